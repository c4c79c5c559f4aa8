"""Sums of rewards that differ only by the rounding of float32."""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-6  # relative to the largest: sums of float32 rewards in another order differ by less


HALF_STEP = 2.0**-24  # of float32, relative to the number that is rounded
CANCELLED = 1e-12  # what may be left of rewards in Python's own precision that add up to 0


def all_equal(sums: Sequence[float], rounding: float = CANCELLED) -> bool:
    """Return whether sums of rewards are equal up to rounding; the sequence must not be empty.

    Args:
        sums: to compare.
        rounding: how far it may take them apart, where rewards cancel that are larger than their sum.
    """
    return max(sums) - min(sums) <= max(ROUNDING * max(map(abs, sums)), rounding)
