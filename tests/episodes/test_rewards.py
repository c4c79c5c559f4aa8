"""A reward that is not finite is an error, wherever it enters: environments, scorers, interactions."""

from __future__ import annotations

import asyncio
import math

import gymnasium
import numpy as np
import pytest

from lightning_agentrl.episodes.env_worker import EnvWorker, Start
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.episode import Prompt
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.errors import EnvError
from tests.types.samples import action, prompt, turn

START = Start(env=3, episode=1, seed=5)
BAD = [math.nan, math.inf, -math.inf, 1e39]  # the last one is finite in float64 only


class Paying(gymnasium.Env[str, str]):
    """Pays what it is told, the last of it for ever."""

    def __init__(self, rewards: list[float]) -> None:
        self.rewards = rewards

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "begin", {}

    def step(self, action):
        return "on", self.rewards.pop(0) if len(self.rewards) > 1 else self.rewards[0], False, False, {}


def play(rewards: list[float], retries: int) -> tuple[EnvWorker, float]:
    worker = EnvWorker(lambda: Environment(lambda: Paying(rewards)), retries=retries)
    worker.reset_now(START)
    return worker, asyncio.run(worker.step("left")).reward


@pytest.mark.parametrize("reward", [*BAD, 10**400])
def test_an_environment_that_gives_one_is_asked_again(reward):
    with pytest.warns(UserWarning, match="environment 3, episode 1 with seed 5, in turn 0"):
        worker, given = play([reward, 0.5], retries=1)
    assert given == 0.5
    assert worker.take_errors() == ("reward",)


def test_past_its_retries_the_error_has_its_kind_and_place():
    with pytest.warns(UserWarning, match="trying again"), pytest.raises(EnvError) as error:
        play([math.nan], retries=2)
    assert error.value.kind == "reward"
    assert "environment 3" in error.value.__notes__[0]


def test_an_array_of_rewards_is_a_broken_contract():
    with pytest.raises(EnvError, match="a reward of type ndarray; it must be a number") as error:
        play([np.zeros(2)], retries=0)
    assert error.value.kind == "contract"


@pytest.mark.parametrize("field", ["reward", "env_reward", "episode_return"])
def test_an_interaction_cannot_record_or_amend_one(field):
    recorder = Recorder(2, grows=False)
    recorder.record(Prompt((), (prompt(1),), 0), action(11), turn(env=2, episode=4))
    with pytest.raises(EnvError) as error:
        recorder.amend(4, **{field: math.nan})
    assert error.value.kind == "reward"
    assert "environment 2" in str(error.value)
    for wrong in (math.inf, 10**400):
        with pytest.raises(EnvError, match="gave the reward inf"):
            recorder.record(Prompt((), (prompt(1),), 0), action(11), turn(**{field: wrong}))
    (sample,) = recorder.samples()
    assert getattr(sample.turns[0], field) == 0.0  # the turn is as it was, and no other was added
