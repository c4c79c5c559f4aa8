"""A critic with PopArt in whole runs: the size of rewards does not matter."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_agentrl.agents import Optim, PPOAgent
from lightning_agentrl.agents.ppo import KL
from lightning_agentrl.models.critic import SharedCritic, follow_returns
from tests.agents.harness import make_data, make_trainer


class OtherUnits(PPOAgent):
    """Counts rewards in other units."""

    unit = 1.0

    def shape_rewards(self, rollout):
        return super().shape_rewards(rollout) * self.unit


def weights_after(path, folder, unit, popart):
    """Three iterations of two steps, without what compares rewards with other numbers."""
    agent = OtherUnits(
        str(folder),
        critic=SharedCritic(popart=popart),
        kl=KL(reward=0.0),
        optim=Optim(lr_actor=1e-3, lr_critic=1e-2),
    )
    agent.unit = unit
    trainer = make_trainer(path, 3)
    trainer.fit(agent, make_data())
    actor = torch.cat([p.detach().flatten() for p in agent.actor.parameters()])
    return actor, float(trainer.callback_metrics["critic/value_std"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_with_popart_the_unit_of_rewards_does_not_matter(tmp_path, exact_folder):
    """On a shared trunk the value loss outweighs the policy's without it. (Whitening adds 1e-8 to a scale.)"""
    ones, hundreds = (
        [weights_after(tmp_path, exact_folder, unit, popart) for unit in (1.0, 256.0)] for popart in (0.1, None)
    )
    (actor, spread), (same, wider) = ones
    torch.testing.assert_close(actor, same, rtol=1e-4, atol=1e-6)
    assert wider == pytest.approx(256 * spread, rel=1e-3)
    (actor, _), (other, _) = hundreds
    assert (actor - other).abs().max() > 1e-4


def built(popart: float | None) -> SharedCritic:
    critic = SharedCritic(popart=popart)
    critic.build(4, lambda model: pytest.fail("a shared critic has no model"))
    return critic.double()


def test_units_follow_the_returns_where_there_are_any():
    critic = built(0.1)
    told = {"critic/return_mean": 3.0, "critic/return_std": 2.0}
    units = {"critic/popart_mean": 3.0, "critic/popart_std": 2.0}
    assert follow_returns(critic, told) == pytest.approx(units)
    for nothing in ({}, {"critic/return_mean": math.nan, "critic/return_std": math.nan}):
        assert follow_returns(critic, nothing) == {}
    assert (float(critic.head.mean), float(critic.head.std)) == pytest.approx((3.0, 2.0))
    assert follow_returns(built(None), told) == follow_returns(None, told) == {}
