"""Rewards before estimation."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_in_reward(rewards_BT: Tensor, kl_BT: Tensor, mask_BT: Tensor, beta: float) -> Tensor:
    """``r - beta * kl`` on action tokens, ``r`` elsewhere."""
    return rewards_BT - beta * torch.where(mask_BT.bool(), kl_BT, 0.0)
