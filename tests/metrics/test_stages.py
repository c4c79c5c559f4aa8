"""How long the stages of an iteration take, and how much they work through: `time/*`."""

from __future__ import annotations

import pytest

from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.metrics.stages import StageClock
from tests.metrics.clock import FakeClock

EXPECTED = {
    "time/iteration_seconds": 2 + 1 + 3 + (1 + 3) + 5 + 2 + 6,  # also the 5 that lie between stages
    "time/collect_seconds": 2 + 3,  # the weights are sent in these
    "time/sync_seconds": 0.5 + 1.5,
    "time/collect_turns_per_second": 20 / 5,
    "time/collect_tokens_per_second": 1000 / 5,
    "time/score_seconds": 1,
    "time/score_turns_per_second": 20 / 1,
    "time/score_tokens_per_second": 900 / 1,
    "time/update_seconds": 4,
    "time/update_turns_per_second": (8 + 12) / 4,
    "time/update_tokens_per_second": (400 + 500) / 4,
    "time/log_seconds": 2,  # there are no turns to count
    "time/validate_seconds": 6,
    "time/collect_to_update": (2 + 3) / 4,
    "time/update_shared": 1 - (350 + 380) / (400 + 500),  # the rows hold 900 tokens, of which 730 are computed
    "time/update_padding": 40 / (350 + 420),
}
# Of a collection of 8 seconds that was waited for for 2
OF_BACKGROUND = {
    "time/iteration_seconds": 2 + 0.25,
    "time/collect_seconds": 2 + 0.25,
    "time/sync_seconds": 0.25,
    "time/collect_beside_seconds": 8,
    "time/collect_turns_per_second": 20 / 8,
    "time/collect_tokens_per_second": 1000 / 8,
}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return FakeClock(monkeypatch)


def read(clock: StageClock) -> dict[str, float]:
    return over_ranks(clock.read())


def work(clock: StageClock, now: FakeClock, name: str, seconds: float, sync: float = 0.0) -> None:
    """Of the seconds, ``sync`` are spent on sending weights."""
    with clock.stage(name):
        if sync:
            with clock.part("sync"):
                now.wait(sync)
        now.wait(seconds - sync)


def iteration(clock: StageClock, now: FakeClock) -> None:
    """23 seconds, 5 of them between stages."""
    work(clock, now, "collect", 2, sync=0.5)
    work(clock, now, "score", 1)
    work(clock, now, "collect", 3, sync=1.5)
    clock.count("collect", turns=20, tokens=1000)
    clock.count("score", turns=20, tokens=900)
    for seconds, turns, tokens in ((1, 8, 400), (3, 12, 500)):
        work(clock, now, "update", seconds)
        clock.count("update", turns, tokens)
    clock.count_packed(400, 350, 0)
    clock.count_packed(500, 420, 40)
    now.wait(5)
    work(clock, now, "log", 2)
    work(clock, now, "validate", 6)


def test_every_number_by_hand(now):
    clock = StageClock()
    iteration(clock, now)
    assert read(clock) == pytest.approx(EXPECTED)


def test_reading_forgets(now):
    clock = StageClock()
    iteration(clock, now)
    read(clock)
    assert read(clock) == {"time/iteration_seconds": 0}
    iteration(clock, now)
    assert read(clock) == pytest.approx(EXPECTED)


def test_time_before_the_first_reading_of_an_iteration_belongs_to_none(now):
    """What the agent does as an epoch begins."""
    clock = StageClock()
    work(clock, now, "validate", 7)
    now.wait(3)
    read(clock)
    iteration(clock, now)
    assert read(clock) == pytest.approx(EXPECTED)


def test_work_in_the_background_is_measured_by_its_own_seconds(now):
    """2 seconds are waited for it, then the weights are sent and the next one is begun."""
    clock = StageClock()
    work(clock, now, "collect", 2)
    clock.count("collect", turns=20, tokens=1000, beside=8.0)
    work(clock, now, "collect", 0.25, sync=0.25)
    assert read(clock) == pytest.approx(OF_BACKGROUND)
    assert read(clock) == {"time/iteration_seconds": 0}


def test_a_stage_that_fails_still_took_its_time(now):
    clock = StageClock()

    def collect() -> None:
        with clock.stage("collect"):
            now.wait(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect()
    assert read(clock) == {"time/iteration_seconds": 2, "time/collect_seconds": 2}


def test_so_does_a_part_that_fails(now):
    clock = StageClock()

    def validate() -> None:
        with clock.stage("validate"), clock.part("sync"):
            now.wait(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        validate()
    assert read(clock) == {"time/iteration_seconds": 2, "time/validate_seconds": 2, "time/sync_seconds": 2}


def test_without_an_update_there_is_nothing_to_compare_collecting_with(now):
    clock = StageClock()
    work(clock, now, "collect", 2)
    assert "time/collect_to_update" not in read(clock)
    work(clock, now, "update", 2)
    assert "time/collect_to_update" not in read(clock)


def test_turns_that_took_no_time_have_no_rate(now):
    clock = StageClock()
    work(clock, now, "score", 0)
    clock.count("score", turns=3, tokens=30)
    assert read(clock) == {"time/iteration_seconds": 0, "time/score_seconds": 0}


def test_listeners_hear_how_far_the_running_stage_is():
    clock = StageClock()
    heard: list[tuple[str, int, int]] = []
    clock.listeners.append(lambda stage, done, total: heard.append((stage, done, total)))
    with clock.stage("collect", total=4):
        clock.advance()
        clock.advance(2)
    with clock.stage("update", total=9, done=3):
        clock.advance()
    with clock.stage("log"):
        pass
    assert heard == [
        ("collect", 0, 4),
        ("collect", 1, 4),
        ("collect", 3, 4),
        ("update", 3, 9),
        ("update", 4, 9),
        ("log", 0, 0),
    ]
    assert clock.running == "log"


def test_rates_count_the_seconds_of_a_process_without_turns(monkeypatch):
    now, numbers = FakeClock(monkeypatch), []
    for turns in (10, 0):  # of two processes
        clock = StageClock()
        with clock.stage("update"):
            now.wait(2)
        clock.count("update", turns, 10 * turns)
        numbers.append(clock.read(world_size=2)["time/update_turns_per_second"])
    assert sum(number.total for number in numbers) / sum(number.weight for number in numbers) == 10 / 2


def test_the_stage_that_an_error_ended_is_known_until_the_next() -> None:
    clock = StageClock()
    with pytest.raises(MemoryError), clock.stage("update"):
        raise MemoryError
    assert clock.failed_in == "update"
    with clock.stage("collect"):
        assert clock.failed_in == ""
    assert clock.failed_in == ""
