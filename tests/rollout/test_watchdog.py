"""The watchdog says what a stuck collection waits for, and ends nothing."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lightning_agentrl.engines import TransformersEngine
from lightning_agentrl.rollout import EnvConfig, RolloutDataModule
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.rollout.watchdog import Watchdog
from tests.rollout.scripted import Learner, Scripted, Workplace, workplace

LIMIT = 0.2


@contextmanager
def guarded(place: Workplace, seconds: float = LIMIT) -> Iterator[Collector]:
    watchdog = Watchdog(seconds, "LoggingEngine", lambda: "collect")
    with watchdog.on_guard():
        yield replace(place.collector, watchdog=watchdog)


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [text for warning in caught if (text := str(warning.message)).startswith("nothing has moved")]


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_stuck_environment_is_named_again_and_again(tiny_folder, caught):
    """Environment 1 stands in its second step until it was named twice; the rollout is whole all the same."""

    def stuck(count: int) -> None:
        if count == 2:
            wait_for(lambda: len(told(caught)) >= 2)

    envs = [Scripted(9), Scripted(9, on_step=stuck), Scripted(9)]
    with workplace(tiny_folder, envs) as place, guarded(place) as collector:
        rollout = place.loop.run(collector.fixed_turns(place.sessions, 3))
    assert len(rollout.turns) == 9
    for text in told(caught)[:2]:
        assert text.startswith("nothing has moved for 0 s in stage collect; ")
        assert text.endswith("waiting for step of environment 1")


def test_an_engine_that_does_not_answer_is_named_with_those_who_wait(tiny_folder, caught, monkeypatch):
    asked = threading.Event()

    with workplace(tiny_folder, [Scripted(9), Scripted(9)]) as place:
        sample = place.engine._generate_batch

        def held(requests):
            if not asked.is_set():
                wait_for(lambda: bool(told(caught)))
                asked.set()
            return sample(requests)

        monkeypatch.setattr(place.engine, "_generate_batch", held)
        with guarded(place) as collector:
            place.loop.run(collector.fixed_turns(place.sessions, 2))
    assert told(caught)[0].endswith("waiting for replies of LoggingEngine to environments 0, 1")


def test_an_engine_that_does_not_take_the_weights_is_named(tiny_folder, caught):
    """While nothing is collected yet; what comes afterwards is."""

    class Slow(TransformersEngine):
        def sync(self, policy_version: int) -> None:
            wait_for(lambda: bool(told(caught)))
            super().sync(policy_version)

    sizes = {"num_envs": 2, "turns_per_env": 1, "mini_batch_turns": 2}
    data = RolloutDataModule(EnvConfig("agentrl_envs:Bandit-v0"), engine=Slow(), stall_seconds=LIMIT, **sizes)
    data.setup("fit")
    data.connect(Learner(tiny_folder))
    try:
        assert len(data.collect().turns) == 2
    finally:
        data.teardown("fit")
    assert told(caught)[0].endswith("in stage collect; waiting for Slow to take over the weights")


def test_nothing_is_said_where_something_moves(tiny_folder, caught):
    """One step takes most of the limit, all steps together several times the limit."""
    slow = Scripted(9, on_step=lambda count: time.sleep(0.75))
    with workplace(tiny_folder, [slow]) as place, guarded(place, seconds=2.0) as collector:
        place.loop.run(collector.fixed_turns(place.sessions, 4))
    assert told(caught) == []


def test_zero_turns_it_off(tiny_folder, caught):
    before = threading.active_count()
    with workplace(tiny_folder, [Scripted(9)]) as place:
        started = threading.active_count()
        with guarded(place, seconds=0.0) as collector:
            assert threading.active_count() == started
            place.loop.run(collector.fixed_turns(place.sessions, 1))
    assert started > before
    with pytest.raises(ValueError, match=r"stall_seconds.*0.*-1"):
        RolloutDataModule(EnvConfig("agentrl_envs:Bandit-v0"), stall_seconds=-1)
