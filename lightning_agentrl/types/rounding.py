"""Sums of rewards that differ only by the rounding of float32."""

from __future__ import annotations

from collections.abc import Sequence

ROUNDING = 1e-6  # relative to the largest: sums of float32 rewards in another order differ by less


def all_equal(sums: Sequence[float]) -> bool:
    """Return whether sums of rewards are equal up to rounding; the sequence must not be empty."""
    return max(sums) - min(sums) <= ROUNDING * max(map(abs, sums))
