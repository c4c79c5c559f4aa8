"""Comparison of policies on equal seeds: pass@k, and bootstrap intervals of means and of paired differences.

Suffixes: E environments, S seeds per environment, N episodes per seed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
Interval = tuple[float, float]


def pass_at_k(successes: NDArray[np.bool_], k: int) -> NDArray[np.float64]:
    """Return an unbiased estimate of the probability that at least one of ``k`` episodes succeeds, for each seed.

    With c successes in N episodes, the estimate is 1 - C(N - c, k) / C(N, k), computed as a product that does not
    overflow (Chen et al. 2021, Evaluating Large Language Models Trained on Code).

    Args:
        successes: success of each episode [..., N].
        k: number of episodes, from 1 to N.

    Returns:
        Estimates [...].
    """
    samples = successes.shape[-1]
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= {samples}, the number of episodes per seed")
    failures = samples - successes.sum(-1, keepdims=True)  # [..., 1]
    drawn = np.arange(k)  # a factor is 0 once no failures are left to draw
    return 1.0 - np.prod((failures - drawn) / (samples - drawn), axis=-1)


def bootstrap_interval(x_ES: NDArray[np.float64], level: float = 0.95, seed: int = 0) -> Interval:
    """Return the bootstrap percentile interval (Efron 1979) of the mean over seeds, then over environments.

    Seeds are drawn with replacement within each environment, so environments have equal weights and episodes of one
    seed stay together. For a paired comparison, pass the differences of two policies on the same seeds.

    Args:
        x_ES: a number for each environment and seed, such as the mean success of its episodes.
        level: confidence level.
        seed: seed of the resampling.
    """
    envs, seeds = x_ES.shape
    random = np.random.default_rng(seed)
    means_R = np.zeros(RESAMPLES)
    for x_S in x_ES:  # one environment at a time, [R, S] of memory
        means_R += x_S[random.integers(seeds, size=(RESAMPLES, seeds))].mean(1) / envs
    low, high = np.quantile(means_R, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
