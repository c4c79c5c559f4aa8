"""Statistics of groups, given to each of their members."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.types.rounding import ROUNDING


class Groups:
    """The partition of N members into groups. Results have the shape of the input, [N] or [N, K]: one per member.

    Args:
        labels: [N] or [N, D]; members with equal labels are one group.
        rounding_N: how far rounding may take the number of each member from the true one, where it is a sum of numbers
            that are larger than itself; None: no further than a part in a million.
    """

    def __init__(self, labels: Tensor, rounding_N: Tensor | None = None) -> None:
        self.index_N = labels.unique(dim=0, return_inverse=True)[1] if len(labels) else labels.new_zeros(0).long()
        self.count = int(self.index_N.max()) + 1 if len(labels) else 0
        self.size_N = self.sum(torch.ones(len(labels), dtype=torch.float64, device=labels.device))
        self.rounding_N = torch.zeros_like(self.size_N) if rounding_N is None else rounding_N

    @property
    def single_N(self) -> Tensor:
        """Bool: members that are alone in their group."""
        return self.size_N == 1

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.count, *x.shape[1:]).index_add_(0, self.index_N, x)[self.index_N]

    def mean(self, x_N: Tensor) -> Tensor:
        return self.sum(x_N) / self.size_N

    def std(self, x_N: Tensor) -> Tensor:
        """Return the sample standard deviation (n - 1), 0 for a group of one."""
        return (self.sum((x_N - self.mean(x_N)).square()) / (self.size_N - 1).clamp_min(1)).sqrt()

    def max(self, x_N: Tensor) -> Tensor:
        """Return the maximum of the finite numbers of each group, ``-inf`` if it has none."""
        return x_N.new_full((self.count,), -torch.inf).scatter_reduce_(0, self.index_N, x_N, "amax")[self.index_N]

    def min(self, x_N: Tensor) -> Tensor:
        return -self.max(-x_N)

    def equal(self, x_N: Tensor) -> Tensor:
        """Return bool: members of groups with equal numbers (up to float32 rounding), or of groups of one."""
        rounding_N = torch.maximum(ROUNDING * self.max(x_N.abs()), 2 * self.max(self.rounding_N))
        return self.max(x_N) - self.min(x_N) <= rounding_N

    def others(self, x_N: Tensor) -> Tensor:
        """Return the mean of the other members, NaN for a group of one."""
        return (self.sum(x_N) - x_N) / (self.size_N - 1)
