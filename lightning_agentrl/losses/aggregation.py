"""From losses per token to one number."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

AggregationMode = Literal["token-mean"]


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``x`` where the mask (same shape) is set, a scalar in float32 or better; other numbers are not read.

    Raises:
        ValueError: shapes differ.
    """
    if x.shape != mask.shape:
        raise ValueError(f"expected numbers and mask of one shape, got {list(x.shape)} and {list(mask.shape)}")
    return torch.where(mask.bool(), x.to(torch.promote_types(x.dtype, torch.float32)), 0).sum()


def aggregate(
    x_BT: Tensor, mask_BT: Tensor, mode: AggregationMode = "token-mean", *, total: float, scale: float = 1.0
) -> Tensor:
    """This micro-batch's part of the mini-batch's loss, to be summed over micro-batches and averaged over ranks.

    ``token-mean``: ``sum(x * mask) / total * scale``. As every part is divided by the same total, how a mini-batch is
    split does not change the gradient.

    Args:
        x_BT: loss per token.
        mask_BT: action mask.
        mode: what the mean is taken over.
        total: action tokens of the mini-batch, all micro-batches and ranks together.
        scale: number of data-parallel ranks, against their averaging of gradients.

    Returns:
        A scalar in float32 or better. Without action tokens it is 0 and still has a graph.

    Raises:
        ValueError: unknown mode, a total below 0, or shapes differ.
    """
    if mode not in get_args(AggregationMode):
        raise ValueError(f"loss aggregation must be one of {', '.join(get_args(AggregationMode))}, got '{mode}'")
    if total < 0:
        raise ValueError(f"total must not be negative, got {total}")
    return masked_sum(x_BT, mask_BT) * (scale / max(total, 1))
