"""Numbers of runs, and how sure they are: pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from benchmarks.intervals import T_QUANTILES

Run = Mapping[str, Any]  # as `play` returns it
GOAL = 0.9
RESAMPLES = 10_000
POWER = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, and the smallest true effect that would have been seen in 4 of 5 repetitions."""

    value: float
    low: float
    high: float
    visible: float


def area(run: Run) -> float:
    """Return the mean exact success over the iterations."""
    return fmean(run["curve"][1:])


def area_per_turn(run: Run, turns: float) -> float:
    """Return the mean exact success over the first turns, along the straight lines between iterations."""
    if turns > run["turns"][-1]:
        raise ValueError(f"the run has {run['turns'][-1]} turns, fewer than {turns:g}")
    places = np.array(sorted({*(t for t in run["turns"] if t < turns), turns}), dtype=np.float64)
    return float(np.trapezoid(np.interp(places, run["turns"], run["curve"]), places) / turns)


def dip(run: Run) -> float:
    """Return the worst success less that of the start, 0 or below."""
    return min(run["curve"]) - run["curve"][0]


def end(run: Run) -> float:
    """Return the success at the end."""
    return run["curve"][-1]


def first_at_goal(run: Run) -> int | None:
    """Return the first iteration that reached the goal; None: none did."""
    return next((k for k, success in enumerate(run["curve"]) if k and success >= GOAL), None)


def measured(runs: Mapping[str, Sequence[Run]], measure: str) -> dict[str, list[float]]:
    """Return a measure of all runs by arm. Turns are counted as far as every run has them."""
    turns = min(run["turns"][-1] for of_arm in runs.values() for run in of_arm)
    by_name = {
        "area": area,
        "dip": dip,
        "end": end,
        "area_per_turn": lambda run: area_per_turn(run, turns),
    }
    return {arm: [by_name[measure](run) for run in of_arm] for arm, of_arm in runs.items()}


def quartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half along the last axis; of fewer than four, the mean."""
    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the interquartile mean of values, such as differences of pairs, with a bootstrap over them.

    The percentiles are widened as for Student's t, since a bootstrap of so few is too narrow (Hesterberg 2015).
    """
    data = np.asarray(values, dtype=np.float64)
    count = len(data)
    if count < 2:
        raise ValueError(f"an interval needs at least 2 values, got {count}")
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    means = quartile_mean(data[drawn])
    quantile = T_QUANTILES[min(count - 1, len(T_QUANTILES)) - 1] * math.sqrt(count / (count - 1))
    tail = NormalDist().cdf(-quantile)
    low, high = np.quantile(means, [tail, 1 - tail])
    spread = float(means.std()) * math.sqrt(count / (count - 1))
    return Estimate(float(quartile_mean(data)), float(low), float(high), POWER * spread)


def shown(difference: Estimate) -> bool:
    """Return whether the interval excludes 0."""
    return not difference.low <= 0 <= difference.high


def verdict(difference: Estimate) -> str:
    """Return what a difference of the arm that is claimed to be better and the other one says."""
    if difference.low > 0:
        return "confirmed"
    if difference.high < 0:
        return "refuted: the opposite"
    return f"not shown; {difference.visible:.3f} would have been"
