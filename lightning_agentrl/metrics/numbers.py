"""Numbers by name, reduced over all ranks: a sum, a mean with its own weight, or a maximum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_agentrl.distributed import all_gather


@dataclass(frozen=True)
class Mean:
    """A sum and its divisor, both of which are summed over ranks before the division."""

    total: float
    weight: float


@dataclass(frozen=True)
class Sum:
    """A number that is summed over ranks."""

    total: float


@dataclass(frozen=True)
class Max:
    """A number whose maximum over ranks counts."""

    value: float


Number = Mean | Sum | Max


def masked_mean(x: Tensor, mask: Tensor) -> Mean:
    """Return the mean over the mask, of the same shape, summed in float64; other numbers are not read."""
    return Mean(float(torch.where(mask, x, 0).double().sum()), int(mask.sum()))


class ExactMetric(Metric):
    """A metric of torchmetrics whose sums keep their dtype under every precision of the trainer."""

    full_state_update = False

    def set_dtype(self, dst_type: torch.dtype | str) -> Self:
        return self


class GlobalNumbers(ExactMetric):
    """Sums and weights by name; all ranks have the same names."""

    totals: Tensor
    weights: Tensor

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        for state in ("totals", "weights"):
            self.add_state(state, default=torch.zeros(len(self.names), dtype=torch.float64), dist_reduce_fx="sum")
        self._sums: set[str] = set()

    def update(self, numbers: Mapping[str, Mean | Sum]) -> None:
        self._sums |= {name for name, number in numbers.items() if isinstance(number, Sum)}
        totals = [numbers[name].total if name in numbers else 0.0 for name in self.names]
        weights = [number.weight if isinstance(number := numbers.get(name), Mean) else 0.0 for name in self.names]
        self.totals += torch.tensor(totals, dtype=torch.float64, device=self.totals.device)
        self.weights += torch.tensor(weights, dtype=torch.float64, device=self.weights.device)

    def compute(self) -> dict[str, float]:
        """Return the sums, and the means whose weight is not 0."""
        rows = zip(self.names, self.totals.tolist(), self.weights.tolist(), strict=True)
        means = {name: (total, weight) for name, total, weight in rows}
        return {
            name: total / weight if weight else total
            for name, (total, weight) in means.items()
            if weight or name in self._sums
        }


def over_ranks(numbers: Mapping[str, Number], device: torch.device) -> dict[str, float]:
    """Reduce the numbers over all ranks; a rank may lack some names. Means without weight are left out."""
    added = {name: number for name, number in numbers.items() if not isinstance(number, Max)}
    maxima = {name: number.value for name, number in numbers.items() if isinstance(number, Max)}
    parts = all_gather(({name: isinstance(number, Sum) for name, number in added.items()}, maxima))
    kinds = {name: is_sum for part, _ in parts for name, is_sum in part.items()}
    absent = {name: Sum(0.0) for name, is_sum in kinds.items() if is_sum}
    metric = GlobalNumbers(sorted(kinds)).to(device)
    metric.update({**absent, **added})
    names = sorted({name for _, part in parts for name in part})
    return metric.compute() | {name: max(part[name] for _, part in parts if name in part) for name in names}
