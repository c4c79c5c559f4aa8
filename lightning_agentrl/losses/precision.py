"""Shape and precision of the arguments of losses."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

LIMIT = 20.0  # of log-ratios, so that their exponentials stay finite


def same_shape_float32(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common dtype, at least float32.

    Raises:
        ValueError: shapes differ. Broadcasting [B] against [B, A] would silently give a wrong number.
    """
    check_shapes(**tensors)
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors.values()), torch.float32)
    return tuple(x.to(dtype) for x in tensors.values())


def check_shapes(**tensors: Tensor) -> None:
    """Raise a ValueError with the shapes if they differ."""
    if len({x.shape for x in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"expected tensors of one shape, got {shapes}")


def log_ratio(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return ``logps - old_logps``, the latter a constant, clamped to [-20, 20]."""
    return (logps - old_logps.detach()).clamp(-LIMIT, LIMIT)


def row_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum [B, 1] over the tokens on the mask of each row; other values are not read."""
    return torch.where(mask_BT.bool(), x_BT, 0).sum(1, keepdim=True)


def row_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean [B, 1] over the tokens on the mask of each row, 0 for rows without any."""
    return row_sum(x_BT, mask_BT) / mask_BT.bool().sum(1, keepdim=True).clamp_min(1)
