"""Whitening over the action tokens of the global batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def whiten(x_BT: Tensor, mask_BT: Tensor, reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over masked tokens, unbiased variance; 0 off the mask.

    ``reduce`` sums a tensor over ranks. With fewer than two tokens the numbers stay as they are.
    """
    reduce = reduce or (lambda tensor: tensor)
    mask = mask_BT.bool()
    x = torch.where(mask, x_BT, 0.0).double()
    count, total = reduce(torch.stack([mask.sum().double(), x.sum()])).tolist()
    if count < 2:
        return torch.where(mask, x_BT, 0.0)
    mean = total / count
    squares = float(reduce(torch.where(mask, x - mean, 0.0).square().sum()))
    scaled = (x - mean) / (squares / (count - 1) + 1e-8) ** 0.5
    return torch.where(mask, scaled, 0.0).to(torch.promote_types(x_BT.dtype, torch.float32))
