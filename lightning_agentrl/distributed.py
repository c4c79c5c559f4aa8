"""Exchange between the processes of a run, a no-op when there is only one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
N = TypeVar("N", int, float)


def all_gather(value: T) -> list[T]:
    """Return what every rank holds, in rank order. All ranks must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; ``x`` must lie on a device that the process group can reach."""
    if not (dist.is_available() and dist.is_initialized()):
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x


def max_over_ranks(number: N) -> N:
    """Return the largest of the numbers that the ranks hold. All ranks must call it."""
    return max(all_gather(number))


@dataclass(frozen=True)
class Ranks:
    """Collective operations of a run, with results on the CPU. All ranks must call each method together.

    Args:
        device: the device whose tensors the process group can reach.
        count: number of ranks.
    """

    device: torch.device
    count: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return sum_over_ranks(x.to(self.device)).cpu()

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what every rank holds, in rank order; sizes may differ."""
        return all_gather(x.cpu())

    def sum_by_name(self, numbers: dict[str, float]) -> dict[str, float]:
        """Return sums over all ranks by name; a rank may lack some names."""
        parts = all_gather(numbers)
        return {name: sum(part.get(name, 0.0) for part in parts) for name in sorted(set().union(*parts))}
