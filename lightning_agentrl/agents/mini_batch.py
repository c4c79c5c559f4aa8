"""Random numbers for the tokens of a mini-batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_agentrl.types import Rollout


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
