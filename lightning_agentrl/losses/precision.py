"""What all losses do first."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def same_shape_float32(**tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in their common dtype, float32 at least.

    Raises:
        ValueError: shapes differ. Broadcasting [B] against [B, A] would give a number, and a wrong one.
    """
    if len({x.shape for x in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"expected tensors of one shape, got {shapes}")
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors.values()), torch.float32)
    return tuple(x.to(dtype) for x in tensors.values())
