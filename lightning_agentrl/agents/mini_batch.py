"""What the policy loss needs to know of a whole mini-batch before its first micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_agentrl.agents.scoring import score_policy
from lightning_agentrl.types import Rollout, Scores

if TYPE_CHECKING:
    from lightning_agentrl.agents.agent import Agent


def ready_for_loss(agent: Agent, rollout: Rollout, first: bool) -> Rollout:
    """The mini-batch with picked tokens, and with the old log-probs of a bypass.

    Args:
        agent: whose loss it is.
        rollout: the rows of the mini-batch on this rank.
        first: no step was made since they were scored.
    """
    current = rollout.scores.old_logps if first else None
    if agent.correction is not None and agent.correction.bypass:
        rollout = rollout.union(scores=Scores(old_logps=rollout.rollout_logps))
    if agent.needs_mini_batch_logps:
        if current is None:
            with agent.evaluation_mode():
                scores, _ = score_policy(agent.actor, rollout, replace(agent.reader(), advance=lambda count: None))
            torch.clear_autocast_cache()  # weights that were cast without gradients must not be trained on
            current = scores.old_logps
        assert current is not None
        rollout = replace(rollout, picked=agent.pick_tokens(rollout, current))
    return rollout


def token_noise(rollout: Rollout, seed: int) -> Tensor:
    """[B, A] float64 in [0, 1), 0 off the action mask.

    A token has the same number on whichever rank and in whichever order its row lies, since each row draws from a seed
    of its own.

    Args:
        rollout: rows of a mini-batch.
        seed: of the mini-batch.
    """
    noise_BA = torch.zeros(rollout.action_mask.shape, dtype=torch.float64)
    for row, (sample, count) in enumerate(zip(rollout.samples, rollout.action_mask.sum(1).tolist(), strict=True)):
        turn = sample.turns[0]
        generator = np.random.default_rng([seed, turn.env, turn.episode, turn.index])
        noise_BA[row, :count] = torch.from_numpy(generator.random(count))
    return noise_BA
