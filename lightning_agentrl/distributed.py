"""Exchange between the processes of a run; with one process, nothing to do."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
N = TypeVar("N", int, float)


def all_gather(value: T) -> list[T]:
    """What every rank holds, in the order of ranks. All ranks must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of a tensor over all ranks; ``x`` must lie where the process group can reach it."""
    if not (dist.is_available() and dist.is_initialized()):
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x


def max_over_ranks(number: N) -> N:
    """The largest of the numbers that the ranks hold. All ranks must call it."""
    return max(all_gather(number))
