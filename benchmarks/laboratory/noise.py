"""Signal and noise of gradient estimates: pure functions of their inner products. M estimates, S resamples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Interval:
    """A number with the interval in which 95 of 100 resamples have it."""

    value: float
    low: float
    high: float


def mean_product(products_MM: Tensor, counts_M: Tensor) -> Tensor:
    """Inner product of the means of two estimators, from pairs of different rollouts, so without the noise of either.

    Args:
        products_MM: inner product of the i-th gradient of one estimator and the j-th of the other.
        counts_M: how often each rollout counts. One that counts twice makes no pair with itself.
    """
    own = (counts_M.square() * products_MM.diagonal()).sum()
    pairs = counts_M.sum().square() - counts_M.square().sum()
    return (counts_M @ products_MM @ counts_M - own) / pairs


def relative_variance(products_MM: Tensor, counts_M: Tensor) -> Tensor:
    """Trace of the covariance of a gradient over the squared norm of its mean, from its inner products with itself."""
    signal = mean_product(products_MM, counts_M)
    power = (counts_M * products_MM.diagonal()).sum() / counts_M.sum()
    return (power - signal) / signal


def variance_ratio(of_a_MM: Tensor, of_b_MM: Tensor, counts_M: Tensor) -> Tensor:
    """Relative variance of one estimator over that of another one, on the same rollouts."""
    return relative_variance(of_a_MM, counts_M) / relative_variance(of_b_MM, counts_M)


def cosine(of_a_MM: Tensor, of_b_MM: Tensor, of_both_MM: Tensor, counts_M: Tensor) -> Tensor:
    """Of the mean gradients of two estimators."""
    a, b, both = (mean_product(products, counts_M) for products in (of_a_MM, of_b_MM, of_both_MM))
    return both / (a * b).clamp_min(0).sqrt()


def bootstrap(number: Callable[[Tensor], Tensor], count: int, resamples: int = 2000, seed: int = 0) -> Interval:
    """A number of ``count`` rollouts, and its interval over resamples of them with replacement.

    Args:
        number: takes how often each rollout counts [M].
        count: M.
        resamples: S.
        seed: of the resamples, so that numbers with equal seeds are compared on the same ones.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn_SM = torch.randint(count, (resamples, count), generator=generator)
    counts_SM = torch.zeros(resamples, count, dtype=torch.float64).scatter_add_(
        1, drawn_SM, torch.ones(resamples, count, dtype=torch.float64)
    )
    numbers_S = torch.stack([number(counts_M) for counts_M in counts_SM])
    low, high = numbers_S.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(float(number(torch.ones(count, dtype=torch.float64))), low, high)
