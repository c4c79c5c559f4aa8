"""Environment, prompt, engine, advantages, losses and optimizer together make a policy better, with each estimator."""

from __future__ import annotations

import pytest

from benchmarks.laboratory.every_estimator import BANDIT, IN_ROOMS, TWO_ROOMS, estimators, learn
from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.models.critic import SharedCritic

KINDS = ("GRPO", "OptimalTokenBaseline", "ReMax", "ReinforcePlusPlus")  # groups, their weights, greedy, no critic
MARKS = dict.fromkeys(("DualDiscountGAE", *KINDS), pytest.mark.slow)
NAMES = [pytest.param(name, marks=MARKS.get(name, pytest.mark.long)) for name in estimators()]


@pytest.mark.parametrize("name", NAMES)
def test_a_contextual_bandit(tmp_path, name):
    """A random word pays in one of nine cases, and always the same word in one of three: the goal needs the context."""
    run = learn(BANDIT, estimators()[name], tmp_path, seed=0)
    assert run["curve"][0] < 0.4
    assert run["learned"] is not None
    assert run["learned"] <= 150


@pytest.mark.slow
def test_a_shared_critic(tmp_path):
    run = learn(BANDIT, DualDiscountGAE, tmp_path, seed=0, critic=SharedCritic())
    assert run["curve"][0] < 0.4
    assert run["learned"] is not None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in KINDS[1:] else pytest.mark.long) for name in IN_ROOMS]
)
def test_two_rooms(tmp_path, name):
    """Several turns: the reward comes at the end, behind a door."""
    run = learn(TWO_ROOMS, estimators()[name], tmp_path, seed=0)
    assert run["curve"][0] < 0.4
    assert run["learned"] is not None
