"""How far estimates of values and advantages are from measured ones, which have noise of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
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


def explained_by_exact_values(returns: Sequence[Sequence[float]], starts: Sequence[int]) -> float:
    """Return the share of the variance of returns that the exact values of their states explain: what a critic can.

    The rest is chance, of the policy and of the environment. States of one start have much in common, and their
    branches share random numbers, so the variance of values is told by pairs of states of different starts: half the
    squared difference of their means, less what it owes to the spread within states. Below 0 if chance alone is seen.

    Args:
        returns: independent ones from each state. States with fewer than two are left out.
        starts: what each state followed from; nothing else is common to two of them.

    Returns:
        The share; NaN with fewer than two starts, or where all returns are equal.
    """
    every = [torch.tensor(one, dtype=torch.float64) for one in returns]
    known = [(one, start) for one, start in zip(every, starts, strict=True) if len(one) > 1]
    if len({start for _, start in known}) < 2 or all_equal(torch.cat([one for one, _ in known]).tolist()):
        return math.nan
    variance_N = torch.stack([one.var() for one, _ in known])
    mean_N = torch.stack([one.mean() for one, _ in known])
    noise_N = variance_N / torch.tensor([len(one) for one, _ in known])
    which_N = torch.tensor([start for _, start in known]).unique(return_inverse=True)[1]
    own_NC = nn.functional.one_hot(which_N).double()
    others_N = len(known) - own_NC.sum(0)[which_N]  # states that each is compared with
    mean_N = mean_N - mean_N.mean()  # sums of squares are more exact
    # Over all pairs of different starts, (m - m')^2 = m^2 + m'^2 - 2 m m', where sums of m' are of all but one's own.
    sums_C = own_NC.T @ mean_N
    squares = 2 * (mean_N**2 * others_N).sum() - 2 * (mean_N.sum() ** 2 - (sums_C**2).sum())
    between = float((squares - 2 * (noise_N * others_N).sum()) / others_N.sum()) / 2
    within = float(variance_N.mean())
    return between / (between + within) if between + within > 0 else math.nan
