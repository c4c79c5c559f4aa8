"""Numbers over the seeds of an arm, and how far two arms are apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.ablations.arms import ARMS, BASE, COMPARISONS, SEEDS
from benchmarks.ablations.records import Job, Record
from benchmarks.quickstart_seeds import difference_interval

AREA_OF = "rollout/reward_per_turn"
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; more are treated as the last.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

Interval = tuple[float, float, float]  # difference, low, high


@dataclass(frozen=True)
class Pair:
    """The records of two arms, of the seeds that both have."""

    base: list[Record]
    arm: list[Record]

    @property
    def seeds(self) -> list[int]:
        return [record["seed"] for record in self.base]


def pairs_of(current: Mapping[Job, Record]) -> dict[str, Pair]:
    """Each comparison under the name of its arm."""
    of: dict[str, dict[int, Record]] = {name: {} for name in ARMS}
    for job, record in current.items():
        of[job.arm][job.seed] = record
    pairs = {}
    for comparison in COMPARISONS:
        base, arm = of[BASE], of[comparison.arm]
        seeds = sorted(base.keys() & arm.keys())
        pairs[comparison.arm] = Pair([base[seed] for seed in seeds], [arm[seed] for seed in seeds])
    return pairs


def successes(record: Record, when: str) -> tuple[int, int]:
    """Successful held-out episodes and all of them."""
    numbers = record[when]
    return round(numbers["success"] * numbers["episodes"]), int(numbers["episodes"])


def pooled(records: Sequence[Record], when: str) -> tuple[int, int]:
    pairs = [successes(record, when) for record in records]
    return sum(x for x, _ in pairs), sum(n for _, n in pairs)


def share(records: Sequence[Record], when: str) -> float:
    x, n = pooled(records, when)
    return x / n


def area(record: Record) -> float:
    """Mean height of the curve of reward per turn, by trapezoids over the iterations."""
    points = record["curves"][AREA_OF]
    width = points[-1][0] - points[0][0]
    if not width:
        return float(points[0][1])
    return float(sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(points)) / width)


def welch(arm: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Difference of two means with Welch's 95 % interval: each run is one observation. None with fewer than two."""
    if min(len(arm), len(base)) < 2:
        return None
    parts = [(statistics.variance(xs) / len(xs), len(xs) - 1) for xs in (arm, base)]
    total = sum(variance for variance, _ in parts)
    difference = statistics.mean(arm) - statistics.mean(base)
    if not total:
        return difference, difference, difference
    freedom = total**2 / sum(variance**2 / count for variance, count in parts)
    # Downwards, which widens; the small addition is for 4 that comes out as 3.9999.
    place = min(max(int(freedom + 1e-9), 1), len(T_QUANTILES))
    half = T_QUANTILES[place - 1] * math.sqrt(total)
    return difference, difference - half, difference + half


def success_difference(both: Pair) -> Interval | None:
    """Of held-out success after training: the wider of Welch's interval over runs and Newcombe's over all episodes.

    Three runs may agree by luck, and then Welch's interval would be narrower than that of the episodes they played.
    """
    over_runs = welch(*([share([record], "after") for record in arm] for arm in (both.arm, both.base)))
    if over_runs is None:
        return None
    difference, low, high = difference_interval(pooled(both.arm, "after"), pooled(both.base, "after"))
    return difference, max(min(low, over_runs[1]), -1.0), min(max(high, over_runs[2]), 1.0)


def area_difference(both: Pair) -> Interval | None:
    return welch([area(record) for record in both.arm], [area(record) for record in both.base])


def last(record: Record, name: str) -> float | None:
    """The last point of a curve, if it has one."""
    points = record["curves"].get(name)
    return float(points[-1][1]) if points else None


def complete(current: Mapping[Job, Record]) -> tuple[int, int]:
    """Runs that are there, and those that there should be."""
    wanted = {Job.of(arm, seed) for arm in ARMS for seed in SEEDS}
    return len(wanted & current.keys()), len(wanted)
