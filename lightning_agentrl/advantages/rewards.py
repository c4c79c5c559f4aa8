"""Rewards before estimation."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.layout import result_dtype


def kl_in_reward(rewards_BT: Tensor, kl_BT: Tensor, mask_BT: Tensor, beta: float) -> Tensor:
    """Return ``r - beta * kl`` on action tokens.

    Args:
        rewards_BT: reward of each token.
        kl_BT: KL to the reference at each token, in nats (see ``kl_estimate``).
        mask_BT: action mask.
        beta: reward per nat.

    Returns:
        [B, T] in float32 or better, 0 off the mask, without gradient.
    """
    dtype = result_dtype(rewards_BT, kl_BT)
    return torch.where(mask_BT.bool(), rewards_BT.detach().to(dtype) - beta * kl_BT.detach().to(dtype), 0)
