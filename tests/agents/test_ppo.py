"""The terms of PPO's losses and rewards, from scores alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_agentrl.advantages import GRPO
from lightning_agentrl.agents import KL, PPOAgent
from lightning_agentrl.agents.update import CurrentScores
from lightning_agentrl.losses import Reinforce, clipped_value_loss, kl_loss
from lightning_agentrl.types import Rollout, Sample, Scores
from tests.types.samples import action, glue, prompt, turn


def draw() -> torch.Tensor:
    return torch.randn(2, 4, dtype=torch.float64)


def scored() -> Rollout:
    """A reply of four tokens, of which three are its thought; and two replies in a row, without thoughts."""
    thinking = Sample((prompt(1), action(2, 3, 4, 5)), (turn(thought_tokens=3, reward=1.0),))
    two = Sample((prompt(1), action(2, 3), glue(6), action(4, 5)), (turn(env=1), turn(env=1, index=1, reward=0.5)))
    scores = Scores(old_logps=draw(), ref_logps=draw(), values=draw())
    return Rollout.from_samples([thinking, two]).union(scores=scores, advantages=draw(), returns=draw())


def make(folder: Any, **settings: Any) -> PPOAgent:
    return PPOAgent(str(folder), **{"critic": None, "advantage": GRPO(), "policy_loss": Reinforce()} | settings)


@pytest.mark.parametrize(("share", "on_tokens"), [(None, [1.0] * 4), (0.5, [2 / 3] * 3 + [2.0])])
def test_the_policy_loss_is_weighed_and_has_a_kl_and_an_entropy(tiny_folder, share, on_tokens):
    batch, logps, entropy, weights = scored(), draw(), draw().abs(), draw().abs()
    agent = make(tiny_folder, kl=KL(reward=0.0, loss=0.5, loss_kind="k2", action_share=share), entropy_bonus=0.25)
    pull = kl_loss(logps, batch.scores.old_logps, batch.scores.ref_logps, "k2")
    pull = pull * torch.tensor([on_tokens, [1.0] * 4], dtype=torch.float64)
    surrogate = -batch.advantages * logps
    for given, factor in ((batch, 1.0), (batch.union(weights=weights), weights)):
        expected = factor * surrogate + 0.5 * pull - 0.25 * entropy
        torch.testing.assert_close(agent.policy_loss(given, CurrentScores(logps, entropy)), expected)


def test_the_kl_in_the_reward_is_that_of_the_policy_that_sampled(tiny_folder):
    batch = scored()
    price = 0.1 * (batch.scores.old_logps - batch.scores.ref_logps)
    shaped = make(tiny_folder, kl=KL(reward=0.1)).shape_rewards(batch)
    torch.testing.assert_close(shaped, batch.rewards.double() - price)
    assert make(tiny_folder, kl=KL(reward=0.0, loss=0.1)).shape_rewards(batch) is batch.rewards


def test_the_first_token_of_each_turn_weighs_more_in_the_value_loss(tiny_folder):
    batch, values = scored(), draw()
    loss = make(tiny_folder, value_clip=0.2, first_token_weight=3.0).value_loss(batch, values)
    weights = torch.tensor([[3.0, 1.0, 1.0, 1.0], [3.0, 1.0, 3.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(loss, weights * clipped_value_loss(values, batch.scores.values, batch.returns, 0.2))
