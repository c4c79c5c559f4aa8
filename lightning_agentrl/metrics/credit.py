"""How far estimates of values and advantages are from measured ones, which have noise of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics.functional import spearman_corrcoef

from lightning_agentrl.types.rounding import all_equal


@dataclass(frozen=True)
class Agreement:
    """Estimates beside measurements of the same N numbers.

    Args:
        squared: mean squared difference.
        bias: mean difference, estimate minus measurement.
        rank: Spearman's rank correlation; NaN where either side is constant.
        explained: share of the variance of the measurements that the estimates explain; NaN where there is none.
    """

    squared: float
    bias: float
    rank: float
    explained: float


def agreement(estimates_N: Tensor, measured_N: Tensor) -> Agreement:
    """Compare estimates with measurements; NaN everywhere if there are none."""
    x_N, y_N = estimates_N.double(), measured_N.double()
    if not len(x_N):
        return Agreement(*[math.nan] * 4)
    off_N = x_N - y_N
    same_x, same_y = all_equal(x_N.tolist()), all_equal(y_N.tolist())  # rounding gives equal numbers a variance
    rank = math.nan if same_x or same_y else float(spearman_corrcoef(x_N, y_N))
    explained = math.nan if same_y else 1 - float(off_N.var(correction=0) / y_N.var(correction=0))
    return Agreement(float((off_N**2).mean()), float(off_N.mean()), rank, explained)


def noise_of_means(returns: Sequence[Sequence[float]]) -> float:
    """Return the mean squared error that means of independent returns have by themselves: variance over count.

    Those of fewer than two returns tell nothing; NaN if there are no others.
    """
    each = [float(torch.tensor(one, dtype=torch.float64).var()) / len(one) for one in returns if len(one) > 1]
    return sum(each) / len(each) if each else math.nan


def explained_by_exact_values(returns: Sequence[Sequence[float]]) -> float:
    """Return the share of the variance of returns that the exact values of their states explain: what a critic can.

    The rest is chance, of the policy and of the environment. By a one-way analysis of variance: the variance of the
    states' means, less what it owes to the spread within states. Below 0 if chance alone is seen. A little low for the
    states of few episodes, whose branches share random numbers, so that their means differ less.

    Args:
        returns: independent ones from each state. States with fewer than two are left out.

    Returns:
        The share; NaN with fewer than two states, or where all returns are equal.
    """
    known = [torch.tensor(one, dtype=torch.float64) for one in returns if len(one) > 1]
    if len(known) < 2 or all_equal(torch.cat(known).tolist()):
        return math.nan
    within = sum(float(one.var()) for one in known) / len(known)
    between = float(torch.stack([one.mean() for one in known]).var()) - noise_of_means(returns)
    return between / (between + within) if between + within > 0 else math.nan
