"""Statistics that show whether advantages can be trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_agentrl.advantages.layout import global_moments
from lightning_agentrl.types.rollout import Reduce

FLAT = 1e-5  # of float32 returns in sums over thousands of tokens, relative to values and returns


@dataclass(frozen=True)
class ValueStatistics:
    """Statistics of values and returns over the action tokens of all ranks, with population standard deviations.

    ``explained_variance`` is ``1 - var(returns - values) / var(returns)``. 1: the critic predicts the returns up to a
    constant; 0: no better than a constant; below 0: worse. NaN if all returns are equal up to rounding, since there is
    nothing to explain. ``value_error`` is the root mean square of ``returns - values``, so a constant offset counts.
    """

    value_mean: float
    value_std: float
    return_mean: float
    return_std: float
    value_error: float
    explained_variance: float


@torch.no_grad()
def value_statistics(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, reduce: Reduce | None = None
) -> ValueStatistics:
    """Measure how well values predict returns; all NaN without action tokens.

    Args:
        values_BT: values before the update.
        returns_BT: what they should have been.
        mask_BT: action mask.
        reduce: sums a small float64 tensor over ranks; called twice on each rank. None: there is only one rank.
    """
    mask = mask_BT.bool()
    values_M, returns_M = values_BT[mask].double(), returns_BT[mask].double()
    count, mean, squares = global_moments(torch.stack([values_M, returns_M, returns_M - values_M], 1), reduce)
    if not count:
        return ValueStatistics(*[math.nan] * 6)
    value_std, return_std, error_std = (squares / count).sqrt().tolist()
    # Returns are advantage plus value: equal ones differ by the rounding of the values, which may be far larger.
    flat = return_std <= FLAT * math.hypot(float(mean[0]), value_std, float(mean[1]))
    return ValueStatistics(
        value_mean=float(mean[0]),
        value_std=value_std,
        return_mean=float(mean[1]),
        return_std=return_std,
        value_error=math.hypot(error_std, float(mean[2])),
        explained_variance=math.nan if flat else 1.0 - float(squares[2] / squares[1]),
    )
