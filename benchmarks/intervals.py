"""How far held-out success of two settings is apart, each run of a seed being one observation.

A record is a dictionary with the entries "before" and "after", each with "success" and "episodes".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.quickstart_seeds import difference_interval

Record = dict[str, Any]
Interval = tuple[float, float, float]  # difference, low, high
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; more are treated as the last.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def successes(record: Record, when: str) -> tuple[int, int]:
    """Return successful held-out episodes and all of them, "before" or "after" training."""
    numbers = record[when]
    return round(numbers["success"] * numbers["episodes"]), int(numbers["episodes"])


def pooled(records: Sequence[Record], when: str) -> tuple[int, int]:
    """Return the same over all records."""
    pairs = [successes(record, when) for record in records]
    return sum(x for x, _ in pairs), sum(n for _, n in pairs)


def share(records: Sequence[Record], when: str) -> float:
    x, n = pooled(records, when)
    return x / n


def welch(arm: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Return the difference of two means with Welch's 95 % interval; None with fewer than two values on a side."""
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


def success_difference(arm: Sequence[Record], base: Sequence[Record]) -> Interval | None:
    """Return the difference of held-out success after training, and the wider of two 95 % intervals.

    They are Welch's over runs and Newcombe's over all episodes. Three runs may agree by luck, and then Welch's would be
    narrower than that of the episodes they played.
    """
    over_runs = welch(*([share([record], "after") for record in records] for records in (arm, base)))
    if over_runs is None:
        return None
    difference, low, high = difference_interval(pooled(arm, "after"), pooled(base, "after"))
    return difference, max(min(low, over_runs[1]), -1.0), min(max(high, over_runs[2]), 1.0)
