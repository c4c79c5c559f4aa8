"""Environment, prompt, engine, advantages, losses and optimizer together make a policy better, with each estimator."""

from __future__ import annotations

import pytest

from benchmarks.estimators.learn import BANDIT, TWO_ROOMS, estimators, learn
from benchmarks.estimators.report import IN_ROOMS
from lightning_agentrl.advantages import DualDiscountGAE
from lightning_agentrl.models.critic import SharedCritic

# With a critic, with groups, with greedy episodes, and with none of them
ALWAYS = ("DualDiscountGAE", "GRPO", "ReMax", "ReinforcePlusPlus")
NAMES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in estimators()]


@pytest.mark.parametrize("name", NAMES)  # CI runs the slow ones by themselves
def test_a_contextual_bandit(tmp_path, name):
    """A random word pays in one of nine cases, and always the same word in one of three: the goal needs the context."""
    outcome = learn(BANDIT, estimators()[name], tmp_path, seed=0)
    assert outcome.curve[0] < 0.4
    assert outcome.learned is not None
    assert outcome.learned <= 150


def test_a_shared_critic(tmp_path):
    outcome = learn(BANDIT, DualDiscountGAE, tmp_path, seed=0, critic=SharedCritic())
    assert outcome.curve[0] < 0.4
    assert outcome.learned is not None


@pytest.mark.slow  # CI runs it by itself
@pytest.mark.parametrize("name", IN_ROOMS)
def test_two_rooms(tmp_path, name):
    """Several turns: the reward comes at the end, behind a door."""
    outcome = learn(TWO_ROOMS, estimators()[name], tmp_path, seed=0)
    assert outcome.curve[0] < 0.4
    assert outcome.learned is not None
