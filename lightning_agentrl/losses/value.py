"""Value losses per action token."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import same_shape_float32


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.5) -> Tensor:
    """Return ``0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``, the value loss of OpenAI's PPO code.

    Args:
        values: of the current critic, any shape.
        old_values: at the start of the update, same shape; constants.
        returns: targets, same shape; constants.
        clip: c, how far a value may move before the loss stops pulling it; None: half the squared error.

    Returns:
        Loss per token in that shape, float32 or better, the factor 0.5 included.

    Raises:
        ValueError: shapes differ.
    """
    values, old_values, returns = same_shape_float32(values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    loss = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss


def first_tokens(mask_BA: Tensor, turn_ids_BA: Tensor) -> Tensor:
    """Return the first action token of each turn, [B, A] (bool).

    Turn ids must not fall along a row; those off the mask are not read.
    """
    mask = mask_BA.bool()
    never = torch.full_like(turn_ids_BA[:, :1], torch.iinfo(turn_ids_BA.dtype).min)
    turns = torch.where(mask, turn_ids_BA, never)
    latest = torch.cat([never, turns], 1).cummax(1).values[:, :-1]  # newest turn so far
    return mask & (turns != latest)


def of_first_tokens(values_BA: Tensor, mask_BA: Tensor, turn_ids_BA: Tensor) -> Tensor:
    """Return [B, A]: at each action token the value of the first one of its turn; 0 off the mask.

    Turn ids must not fall along a row; those off the mask are not read.
    """
    columns = torch.arange(mask_BA.shape[1], device=mask_BA.device).expand(mask_BA.shape)
    first = torch.where(first_tokens(mask_BA, turn_ids_BA), columns, 0).cummax(1).values
    return torch.where(mask_BA.bool(), values_BA.gather(1, first.to(values_BA.device)), 0.0)


def first_token_weights(mask_BA: Tensor, turn_ids_BA: Tensor, weight: float) -> Tensor:
    """Return [B, A]: ``weight`` on the first action token of each turn, 1 on the others, 0 off the mask; float32.

    The value of that token bootstraps the previous turn. Means divide by the number of tokens, not by the sum of
    weights. Turn ids must not fall along a row; those off the mask are not read.
    """
    first = first_tokens(mask_BA, turn_ids_BA)
    return torch.where(mask_BA.bool(), torch.where(first, weight, 1.0), 0.0)
