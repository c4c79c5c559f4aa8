"""Numbers that tell whether advantages can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_agentrl.advantages.whitening import global_moments


@torch.no_grad()
def explained_variance(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
) -> float:
    """``1 - var(returns - values) / var(returns)`` over the action tokens of all ranks.

    1: the critic tells the returns apart perfectly; 0: no better than a constant; below: worse. NaN where all returns
    are equal (also with fewer than two tokens), since there is nothing to explain.

    Args:
        values_BT: values before the update.
        returns_BT: what they should have been.
        mask_BT: action mask.
        reduce: sums a small float64 tensor over ranks; called twice on each rank. None: there is one rank.
    """
    mask = mask_BT.bool()
    values_M, returns_M = values_BT[mask].double(), returns_BT[mask].double()
    count, mean, squares = global_moments(torch.stack([returns_M, returns_M - values_M], 1), reduce)
    spread, error = squares.tolist()
    rounding = count * (1e-12 * float(mean[0])) ** 2  # equal returns may miss their mean by the last digit
    return math.nan if spread <= rounding else 1.0 - error / spread
