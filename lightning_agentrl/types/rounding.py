"""Comparison of sums of rewards up to the rounding of float32."""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-6  # largest relative difference of float32 sums of the same rewards in different orders


HALF_STEP = 2.0**-24  # largest relative rounding error of float32
CANCELLED = 1e-12  # largest absolute rounding error of float64 rewards that sum to 0


def all_equal(sums: Sequence[float], rounding: float = CANCELLED) -> bool:
    """Return whether sums of rewards are equal up to rounding; the sequence must not be empty.

    Args:
        sums: sums to compare.
        rounding: largest absolute difference by rounding, for rewards that are larger than their sum.
    """
    return max(sums) - min(sums) <= max(ROUNDING * max(map(abs, sums)), rounding)
