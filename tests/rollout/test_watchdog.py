"""The watchdog says what a stuck collection waits for, and ends nothing."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch.distributed as dist

from lightning_agentrl import stalls
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.episodes import env_worker
from lightning_agentrl.models.loading import load_tokenizer
from lightning_agentrl.rollout import (
    EnvConfig,
    Judge,
    JudgedTurn,
    RawParser,
    RolloutDataModule,
    TurnInteraction,
    ValidationConfig,
)
from lightning_agentrl.rollout.collector import FixedTurns
from lightning_agentrl.rollout.player import Player, Watchdog
from tests.agents.processes import config_text, next_port, run_command
from tests.rollout.scripted import FREE_TEXT, Learner, Scripted, Workplace, play_held_out, workplace
from tests.started import outcomes

LIMIT = 0.2


@contextmanager
def guarded(place: Workplace, seconds: float = LIMIT) -> Iterator[Player]:
    watchdog = Watchdog(seconds, "LoggingEngine")
    with watchdog.on_guard(lambda: "collect"):
        yield replace(place.player, watchdog=watchdog)


def texts_of(caught: list[warnings.WarningMessage]) -> list[str]:
    return [text for warning in caught if (text := str(warning.message)).startswith("nothing has moved")]


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stuck_environment_is_named_again_and_again(tiny_folder, caught):
    """Environment 1 stands in its second step until it was named twice; the rollout is whole all the same."""

    def alone() -> list[str]:  # others may be slow too, on a busy machine
        return [
            text for text in texts_of(caught) if text.endswith("s in stage collect; waiting for step of environment 1")
        ]

    def stuck(count: int) -> None:
        if count == 2:
            wait_for(lambda: len(alone()) >= 2)

    envs = [Scripted(9), Scripted(9, on_step=stuck), Scripted(9)]
    with workplace(tiny_folder, envs, admission="as_they_come") as place, guarded(place) as player:
        rollout = place.loop.run(FixedTurns(player, place.sessions, 3).collect())
    assert len(rollout.turns) == 9
    assert len(alone()) >= 2


def test_an_engine_that_does_not_answer_is_named_with_those_who_wait(tiny_folder, caught, monkeypatch):
    asked = threading.Event()

    def both() -> bool:
        end = "waiting for replies of LoggingEngine to environments 0, 1"
        return any(text.endswith(end) for text in texts_of(caught))

    with workplace(tiny_folder, [Scripted(9), Scripted(9)]) as place:
        sample = place.engine._sample

        def held(*arguments):
            if not asked.is_set():
                wait_for(both)
                asked.set()
            return sample(*arguments)

        monkeypatch.setattr(place.engine, "_sample", held)
        with guarded(place) as player:
            place.loop.run(FixedTurns(player, place.sessions, 2).collect())
    assert both()


class Pondering(Judge):
    """Gives its second verdict when a condition holds, and looks now and then."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.condition, self.asked = condition, 0

    async def judge(self, turn: JudgedTurn) -> float:
        self.asked += 1
        end = time.monotonic() + 30
        while self.asked == 2 and not self.condition():
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        return 0.0


def test_a_judge_that_does_not_answer_is_named_and_not_the_engine(tiny_folder, caught):
    judge = Pondering(lambda: any(text.endswith("; waiting for judge of environment 0") for text in texts_of(caught)))
    with workplace(tiny_folder, [Scripted(9)]) as place, guarded(place) as player:
        place.sessions[0].judge = judge
        place.loop.run(FixedTurns(player, place.sessions, 3).collect())
    assert judge.asked == 3


@pytest.mark.slow
def test_an_engine_that_does_not_take_the_weights_is_named(tiny_folder, caught):
    """While nothing is collected yet; what comes afterwards is."""

    class Slow(TransformersEngine):
        def sync(self, policy_version: int) -> None:
            wait_for(lambda: bool(texts_of(caught)))
            super().sync(policy_version)

    sizes = {"num_envs": 2, "turns_per_env": 1, "mini_batch_turns": 2}
    data = RolloutDataModule(EnvConfig("agentrl_envs:Bandit-v0"), engine=Slow(), stall_seconds=LIMIT, **sizes)
    data.setup("fit")
    Learner(tiny_folder).connect(data)
    try:
        assert len(data.stream.collect().turns) == 2
    finally:
        data.teardown("fit")
    assert texts_of(caught)[0].endswith("in stage collect; waiting for Slow to update its weights")


def test_nothing_is_said_where_something_moves(tiny_folder, caught, monkeypatch):
    """One step takes most of the limit, all steps together several times the limit, by a clock that only steps move."""
    now = time.monotonic()

    def slow(count: int) -> None:
        nonlocal now
        now += 0.75 * LIMIT
        time.sleep(LIMIT)  # the watchdog looks meanwhile

    with workplace(tiny_folder, [Scripted(9, on_step=slow)]) as place, monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        with guarded(place) as player:
            place.loop.run(FixedTurns(player, place.sessions, 4).collect())
    assert texts_of(caught) == []


def test_zero_turns_it_off(tiny_folder, caught):
    before = threading.active_count()
    with workplace(tiny_folder, [Scripted(9)]) as place:
        started = threading.active_count()
        with guarded(place, seconds=0.0) as player:
            assert threading.active_count() == started
            place.loop.run(FixedTurns(player, place.sessions, 1).collect())
    assert started > before


def test_so_many_seconds_that_no_clock_counts_them_are_never_over(tiny_folder, caught):
    with workplace(tiny_folder, [Scripted(9)]) as place, guarded(place, seconds=math.inf) as player:
        place.loop.run(FixedTurns(player, place.sessions, 1).collect())
        assert "watchdog" in {thread.name for thread in threading.enumerate()}  # it watches
    assert not texts_of(caught)


class SlowToBegin(Scripted):
    """Takes its time for everything but its steps."""

    def __init__(self) -> None:
        time.sleep(3 * LIMIT)
        super().__init__(3)

    def reset(self, **given: Any) -> Any:
        time.sleep(3 * LIMIT)
        return super().reset(**given)

    def close(self) -> None:
        time.sleep(3 * LIMIT)


gymnasium.register("SlowToBegin-v0", SlowToBegin)


class NeverCloses(Scripted):
    """Its close takes as long as the test."""

    over = threading.Event()

    def __init__(self) -> None:
        super().__init__(3)

    def close(self) -> None:
        self.over.wait(3600)


gymnasium.register("NeverCloses-v0", NeverCloses)


@pytest.fixture
def held_out(tiny_folder: Path) -> Iterator[RolloutDataModule]:
    """A data module whose held-out environments never close."""
    env, free = EnvConfig("NeverCloses-v0", worker="thread"), TurnInteraction(4, RawParser())
    sizes = {"num_envs": 1, "turns_per_env": 1, "mini_batch_turns": 1}
    validation = ValidationConfig(episodes=2, num_envs=2)
    data = RolloutDataModule(
        env, interaction=free, prompt=FREE_TEXT, validation=validation, stall_seconds=LIMIT, **sizes
    )
    NeverCloses.over.clear()
    data.setup("fit")
    Learner(tiny_folder).connect(data)
    yield data
    NeverCloses.over.set()
    data.teardown("fit")


def test_a_held_out_environment_that_does_not_close_is_named(held_out, caught):
    def named() -> bool:
        return any("NeverCloses-v0" in text for text in texts_of(caught))

    def release() -> None:
        wait_for(named)
        NeverCloses.over.set()

    threading.Thread(target=release).start()
    assert len(play_held_out(held_out, held_out.val_dataloader().seeds)) == 2
    assert named()


def test_a_run_goes_on_without_environments_that_do_not_close(held_out, caught, monkeypatch):
    monkeypatch.setattr(env_worker, "CLOSING_SECONDS", 0.1)
    for _ in range(2):
        assert len(play_held_out(held_out, held_out.val_dataloader().seeds)) == 2
    assert sum("NeverCloses-v0 has not returned" in str(warning.message) for warning in caught) == 4


def _stopped_rank(rank: int, port: int, folder: Path, stopping: int) -> None:
    """Meet the other rank again and again; one of them is stopped in between."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    stalls.watch(0.5)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    for number in range(3):
        all_gather(number)
        if number == 1 and rank == stopping:
            (folder / "stops").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
    stalls.stop_watching()
    all_gather("end")


@pytest.mark.slow
@pytest.mark.parametrize("stopping", [0, 1])
def test_the_other_rank_names_a_rank_that_is_stopped(tmp_path: Path, stopping: int) -> None:
    said = []

    def go_on() -> None:
        log = tmp_path / f"rank{1 - stopping}.log"
        wait_for(lambda: (tmp_path / "stops").exists(), 120)
        wait_for(lambda: f"rank {1 - stopping}: " in log.read_text() and f"rank {stopping}" in log.read_text(), 120)
        said.append(log.read_text())
        os.kill(int((tmp_path / f"pid{stopping}").read_text()), signal.SIGCONT)

    waking = threading.Thread(target=go_on)
    waking.start()
    ends = outcomes(2, _stopped_rank, next_port(), tmp_path, stopping, folder=tmp_path)
    waking.join()
    assert said
    assert [code for code, _ in ends] == [0, 0]


def _run_rank(rank: int, port: int, folder: Path, command: Sequence[str]) -> None:
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": str(port)}
    run_command(folder, command)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


@pytest.mark.slow
def test_a_run_names_a_rank_that_is_stopped_in_its_update(tmp_path: Path, tiny_folder: Path) -> None:
    """The other rank waits inside torch, for gradients."""
    text = config_text(tmp_path, tiny_folder, "SharedCritic")
    text = text.replace("num_envs: 4\n", "num_envs: 4\n    stall_seconds: 0.5\n", 1).replace(
        "max_epochs: 5", "max_epochs: 2"
    )
    where = "{stage: update, iteration: 0, rank: 1, name: SIGSTOP}"
    stop = f"    - {{class_path: tests.callbacks.signalling.SignalAt, init_args: {where}}}\n"
    (tmp_path / "config.yaml").write_text(text + stop)
    command = ["fit", "--config", str(tmp_path / "config.yaml"), "--trainer.devices", "2", "--trainer.strategy", "ddp"]

    def go_on() -> None:
        """Wait until the rank is stopped: on a busy machine its beats may be late before."""
        log, pid = tmp_path / "rank0.log", tmp_path / "pid1"
        wait_for(lambda: pid.exists() and _is_stopped(int(pid.read_text())), 300)
        before = len(log.read_text())
        wait_for(lambda: "no sign of life for 0.5 s from rank 1" in log.read_text()[before:], 300)
        os.kill(int(pid.read_text()), signal.SIGCONT)

    waking = threading.Thread(target=go_on, daemon=True)
    waking.start()
    ends = outcomes(2, _run_rank, next_port(), tmp_path, command, folder=tmp_path, seconds=400)
    assert [code for code, _ in ends] == [0, 0], ends
    assert not waking.is_alive()


def test_what_holds_up_the_start_or_the_end_of_a_run_is_named(
    tiny_folder: Path, caught: list[warnings.WarningMessage]
) -> None:
    env, free = EnvConfig("SlowToBegin-v0", worker="thread"), TurnInteraction(4, RawParser())
    sizes = {"num_envs": 1, "turns_per_env": 1, "mini_batch_turns": 1}
    data = RolloutDataModule(env, interaction=free, prompt=FREE_TEXT, stall_seconds=LIMIT, **sizes)
    data.setup("fit")
    data.check(load_tokenizer(str(tiny_folder)), 2048)
    data.teardown("fit")
    for place in ("setup; waiting for SlowToBegin-v0 to be made", "setup; waiting for the first reset of", "teardown;"):
        assert any(place in text for text in texts_of(caught))
