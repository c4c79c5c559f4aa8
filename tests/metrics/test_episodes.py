"""Whole episodes: `rollout/success_window` over the last ones, `val/*` of held-out ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.agents.metrics_of_run import RecentEpisodes
from lightning_agentrl.distributed import Mean
from lightning_agentrl.metrics.episodes import (
    EpisodeMetrics,
    EpisodeResult,
    reported_means,
    summarise,
    wilson_interval,
)
from lightning_agentrl.types import Rollout, Sample, StopReason
from tests.metrics.rollouts import by_hand, of_envs
from tests.types.samples import action, prompt, turn

WINDOW = "rollout/success_window"

RESULTS = [
    EpisodeResult(success=True, total_reward=3.0, turns=2, valid_turns=2, progression=1.0),
    EpisodeResult(success=False, total_reward=-1.0, turns=5, valid_turns=3, lost=True, progression=0.4),
    EpisodeResult(success=True, total_reward=2.0, turns=1, valid_turns=0, progression=1.0),
    EpisodeResult(success=True, total_reward=2.5, turns=4, valid_turns=4, progression=1.0),
]
# Bounds of 3 in 4: with z² = 3.841459 the middle is (0.75 + z² / 8) / (1 + z² / 4) = 1.2301823 / 1.9603647, the half
# width sqrt(z² * 0.75 * 0.25 / 4 + z⁴ / 64) / (1 + z² / 4) = 0.6408148 / 1.9603647
VAL_EXPECTED = {
    "val/success": (1 + 0 + 1 + 1) / 4,
    "val/success_low": (1.2301823 - 0.6408148) / 1.9603647,
    "val/success_high": (1.2301823 + 0.6408148) / 1.9603647,
    "val/return": (3 - 1 + 2 + 2.5) / 4,
    # squares of the distances from 1.625, over 3 for the variance, over 4 for that of the mean
    "val/return_error": ((1.375**2 + 2.625**2 + 0.375**2 + 0.875**2) / 3 / 4) ** 0.5,
    "val/progression": 3.4 / 4,
    "val/progression_error": ((3 * 0.15**2 + 0.45**2) / 3 / 4) ** 0.5,
    "val/mean_turns": (2 + 5 + 1 + 4) / 4,
    "val/valid_action_ratio": (2 + 3 + 0 + 4) / (2 + 5 + 1 + 4),  # of turns, not of episodes
    "val/episodes": 4,
    "val/lost_episodes": 1,
}


def ended(*successes: bool) -> Rollout:
    """A rollout with an ended episode for each."""
    end = {"terminated": True, "stop": StopReason.ENV_DONE}
    turns = [turn(env=env, success=success, **end) for env, success in enumerate(successes)]
    return Rollout.from_samples([Sample((prompt(1), action(2)), (one,)) for one in turns])


def held_out(results: Sequence[EpisodeResult]) -> dict[str, float]:
    metrics = EpisodeMetrics()
    metrics.update(results)
    return {f"val/{name}": number for name, number in metrics.compute().items()}


def played(lengths: Sequence[Sequence[tuple[int, bool]]], turns: int, first: int) -> Rollout:
    """Turns from `first` on of environments that play episodes of these lengths, with these successes."""
    samples = []
    for env, episodes in enumerate(lengths):
        labels = [(n, i, length, won) for n, (length, won) in enumerate(episodes) for i in range(length)]
        for episode, index, length, won in labels[first : first + turns]:
            end: dict[str, Any] = {"terminated": True, "stop": StopReason.ENV_DONE} if index == length - 1 else {}
            one = turn(env=env, episode=episode, index=index, success=won if end else None, **end)
            samples.append(Sample((prompt(1), action(2)), (one,)))
    return Rollout.from_samples(samples)


EPISODES = st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=16, max_size=16)


@given(
    lengths=st.lists(EPISODES, min_size=1, max_size=4),
    turns=st.integers(1, 5),
    size=st.integers(4, 9),
    enough=st.integers(1, 4),
)
def test_window_is_of_all_that_began_before_any_that_runs(lengths, turns, size, enough):
    recent = RecentEpisodes(size, enough)
    for until in range(turns, 16 + 1, turns):
        numbers = recent.update(played(lengths, turns, until - turns))
        begun = []  # (turn of the begin, environment, end, success)
        for env, episodes in enumerate(lengths):
            starts = [sum(length for length, _ in episodes[:n]) for n in range(len(episodes))]
            ones = zip(starts, episodes, strict=True)
            begun += [(start, env, start + length, won) for start, (length, won) in ones if start < until]
        runs = min((start for start, _, end, _ in begun if end > until), default=until)
        known = [(start, env, won) for start, env, _, won in begun if start < runs]
        assert (WINDOW in numbers) == (len(known) >= enough)
        if numbers:  # of those that begin at once, the one of the first environment is the first to be forgotten
            last = [won for *_, won in sorted(known)][-size:]
            assert numbers[WINDOW] == pytest.approx(sum(last) / len(last))


def test_window_does_not_favour_short_episodes():
    """Half of the episodes are solved within two turns, the others fail after nine."""
    draw = random.Random(0)
    lengths = [[draw.choice([(2, True), (9, False)]) for _ in range(30)] for _ in range(40)]
    recent = RecentEpisodes()
    shares = [recent.update(played(lengths, 3, first)).get(WINDOW) for first in range(0, 60, 3)]
    assert shares[:2] == [None, None]  # nothing but solved ones have ended
    assert all(abs(success - 0.5) < 0.2 for success in shares[3:])  # four standard errors


@pytest.mark.parametrize(("group", "sides"), [(None, 1), (3, 1), (3, 2)])
def test_window_favours_neither_success_nor_a_side_where_more_than_it_holds_begin_at_once(group, sides):
    """Every second episode is solved: of two sides the one that begins."""
    end = {"terminated": True, "stop": StopReason.ENV_DONE, "group": group}
    numbers = [divmod(number, sides) for number in range(256)]
    turns = [turn(env=env, episode=side, success=(side if sides > 1 else env % 2) == 0, **end) for env, side in numbers]
    ends = [Sample((prompt(1), action(2)), (one,)) for one in turns]
    assert RecentEpisodes().update(Rollout.from_samples(ends)) == {WINDOW: 0.5}


def test_window_does_not_wait_for_an_environment_that_is_gone():
    recent = RecentEpisodes(enough=1)
    assert recent.update(of_envs(by_hand(), [2])) == {}
    assert recent.update(ended(True, False)) == {WINDOW: 1 / 2}


def test_window_is_continued_from_a_checkpoint():
    lengths = [[(2, True), (5, False)] * 3, [(4, False), (1, True)] * 3]
    first, second = RecentEpisodes(3, 1), RecentEpisodes(3, 1)
    first.update(played(lengths, 4, 0))
    second.update(ended(True))
    second.load_state_dict(deepcopy(first.state_dict()))
    for begin in (4, 8):
        assert first.update(played(lengths, 4, begin)) == second.update(played(lengths, 4, begin)) != {}


def test_held_out_numbers_by_hand():
    assert held_out(RESULTS) == pytest.approx(VAL_EXPECTED, rel=0, abs=1e-7)


def test_held_out_numbers_do_not_depend_on_the_order_or_on_how_often_they_are_updated():
    metrics = EpisodeMetrics()
    for result in RESULTS[::-1]:
        metrics.update([result])
    numbers = {f"val/{name}": number for name, number in metrics.compute().items()}
    assert numbers == pytest.approx(held_out(RESULTS), rel=1e-12)
    metrics.reset()
    metrics.update(RESULTS[:1])
    assert metrics.compute()["episodes"] == 1


@pytest.mark.parametrize("far", [1e7, -1e9, 1e12])
@pytest.mark.parametrize("at_once", [1, 3, 4])
def test_the_error_of_a_return_does_not_depend_on_how_far_it_is_from_0(far: float, at_once: int):
    metrics = EpisodeMetrics()
    for first in range(0, len(RESULTS), at_once):
        metrics.update([replace(r, total_reward=far + r.total_reward) for r in RESULTS[first : first + at_once]])
    numbers = metrics.compute()
    assert numbers["return"] == pytest.approx(far + VAL_EXPECTED["val/return"], rel=1e-15)
    assert numbers["return_error"] == pytest.approx(VAL_EXPECTED["val/return_error"], rel=1e-3)


def test_held_out_numbers_of_no_episode():
    assert held_out([]) == {}


def test_an_episode_is_summed_up_by_its_last_turn_and_its_valid_turns():
    end = turn(index=2, episode_return=1.5, truncated=True, stop=StopReason.MAX_TURNS, success=None)
    turns = [turn(valid=False, episode_return=9.0), turn(index=1), end]
    assert summarise(turns) == EpisodeResult(True, 1.5, turns=3, valid_turns=2, progression=1.0)
    reporting = [*turns[:-1], replace(end, metrics={"progression": 0.25})]
    assert summarise(reporting, source=2) == EpisodeResult(True, 1.5, 3, 2, False, 0.25, 2, {"progression": 0.25})
    calling = [replace(one, metrics={"tools/parsed": calls}) for one, calls in zip(turns, (1.0, 2.0, 0.0), strict=True)]
    assert summarise(calling).metrics == {"tools/parsed": 3.0}  # calls of all turns: the last one seldom has any


@pytest.mark.parametrize(("rewards", "success"), [((0.1, 0.2, -0.3), False), ((0.1, 0.2), True), ((-0.1,), False)])
def test_a_return_of_0_is_no_success_whatever_rounding_leaves_of_it(rewards, success):
    end = turn(episode_return=sum(rewards), terminated=True, stop=StopReason.ENV_DONE, success=None)
    assert summarise([end]).success is success


@pytest.mark.parametrize("told", [True, None])
def test_an_episode_that_is_lost_to_a_fault_has_not_succeeded_whatever_it_earned_before(told):
    end = turn(episode_return=5.0, success=told, truncated=True, stop=StopReason.ENV_FAULT)
    assert summarise([end], lost=True) == EpisodeResult(False, 5.0, turns=1, valid_turns=1, lost=True, progression=0.0)
    assert summarise([], lost=True, source=1) == EpisodeResult(False, 0.0, turns=0, valid_turns=0, lost=True, source=1)


def test_what_environments_tell_is_averaged_over_the_episodes_that_tell_it():
    ends = [{"progression": 1.0, "bumps": 3.0}, {"progression": 0.0}, {}]
    results = [summarise([turn(metrics={"progression": 9.0}), turn(index=1, metrics=end)]) for end in ends]
    assert reported_means(results) == {"bumps": Mean(3.0, 1), "progression": Mean(1.0, 2)}
    assert reported_means([]) == {}


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 3.841459 / 13.841459),  # z² / (n + z²)
        (10, 10, 10 / 13.841459, 1.0),
        (64, 128, 0.5 - 0.0853478, 0.5 + 0.0853478),  # z / 2 / sqrt(n + z²): the ±8 points of the docs
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_golden_numbers(successes, episodes, low, high):
    assert wilson_interval(successes, episodes) == pytest.approx((low, high), abs=1e-7)
