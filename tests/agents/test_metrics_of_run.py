"""What is logged of a gradient: the part of tokens that are trained on, by the weights that they have."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.metrics_of_run import describe_collected, describe_gradient, describe_step
from lightning_agentrl.rollout import EnvConfig
from lightning_agentrl.types import Rollout, Scores
from tests.agents.harness import make_data
from tests.types.samples import windowed

POWERS = ("variance_proxy/proxy2_total_power", "variance_proxy/token_total_power")


def scored() -> Rollout:
    rollout = Rollout.from_samples(windowed())
    logps, squares, advantages = (torch.rand(4, 4, dtype=torch.float64) for _ in range(3))
    return rollout.union(scores=Scores(old_logps=-logps, sum_pi_squared=squares), advantages=advantages - 0.5)


def numbers(rollout: Rollout) -> dict[str, float]:
    return describe_gradient(rollout, 0.5, lambda x: x)


def test_a_gradient_is_that_of_the_tokens_that_are_trained_on():
    rollout = scored()
    rejected = rollout.union(loss_mask=rollout.action_mask & torch.tensor([True, False, True, False])[:, None])
    assert numbers(rejected) == pytest.approx(numbers(rollout.select([0, 2])))
    assert numbers(rejected)["variance_proxy/proxy1_signal_strength"] == 0.25


def test_a_token_that_weighs_twice_as_much_has_four_times_the_energy():
    rollout = scored()
    weighed = rollout.union(weights=torch.full((4, 4), 2.0, dtype=torch.float64))
    for name in POWERS:
        assert numbers(weighed)[name] == pytest.approx(4 * numbers(rollout)[name])


def test_of_a_step_that_is_not_finite_only_finite_numbers_are_logged(tiny_folder):
    means, norms = {"policy/loss": math.nan, "critic/loss": 0.5}, {"actor": math.inf, "critic": 2.0}
    known = {"critic/loss": 0.5, "grad_norm/critic": 2.0}
    agent = PPOAgent(str(tiny_folder))
    agent.steps.not_finite = 1
    assert describe_step(agent, scored(), means, norms, False) == known | {
        "guard/not_finite": 1.0,
        "guard/skipped": 1.0,
    }
    finite = {"policy/loss": 1.0}, {"actor": 3.0}
    told = {"policy/loss": 1.0, "grad_norm/actor": 3.0, "guard/not_finite": 0.0, "guard/skipped": 1.0}
    agent.steps.not_finite = 0
    assert describe_step(agent, scored(), *finite, False) == told


@pytest.mark.parametrize("games", [1, 2])
def test_where_there_are_several_sources_each_has_numbers_of_its_own(tiny_folder, games):
    bandits = [EnvConfig("agentrl_envs:Bandit-v0", {"arms": arms}) for arms in (2, 3)]
    data = make_data(env=None, envs=bandits[:games])
    agent = PPOAgent(str(tiny_folder))
    agent._trainer = SimpleNamespace(datamodule=data)
    numbers = describe_collected(agent, Rollout.from_samples(windowed()))
    sources = {name.split("/")[2] for name in numbers if name.startswith("rollout/source/")}
    assert sources == ({"Bandit-v0", "Bandit-v0_2"} if games > 1 else set())
