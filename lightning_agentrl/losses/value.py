"""Value losses per action token."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.5) -> Tensor:
    """``0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``, or half the square without a clip."""
    loss = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss


def first_token_weights(mask_BA: Tensor, turn_ids_BA: Tensor, weight: float) -> Tensor:
    """[B, A] ``weight`` on the first action token of each turn, 1 on the others, 0 off the mask.

    That token's value bootstraps the turn before. Means divide by the number of tokens, not by the sum of weights.
    """
    mask = mask_BA.bool()
    before = torch.full_like(turn_ids_BA[:, :1], -(2**62))
    turns = torch.where(mask, turn_ids_BA, before)
    latest = torch.cat([before, turns], 1).cummax(1).values[:, :-1]  # newest turn so far; turn ids never fall in a row
    first = mask & (turn_ids_BA != latest)
    return torch.where(mask, torch.where(first, weight, 1.0), 0.0)
