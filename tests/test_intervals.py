"""The interval of a difference between two settings, by hand: runs of seeds, and the episodes that they played."""

from __future__ import annotations

import pytest

from benchmarks import intervals
from benchmarks.intervals import Record
from benchmarks.quickstart_seeds import difference_interval


def records(*afters: float) -> list[Record]:
    before = {"success": 0.3, "episodes": 10}
    return [{"before": before, "after": before | {"success": after}} for after in afters]


def test_differences_of_three_seeds() -> None:
    """By hand: variances 0.01 of three runs each, so an error of sqrt(2 * 0.01 / 3) = 0.08165 and t(4) = 2.776."""
    base, arm = records(0.5, 0.6, 0.7), records(0.8, 0.9, 1.0)
    assert intervals.pooled(base, "after") == (18, 30)
    assert intervals.pooled(arm, "after") == (27, 30)
    difference = intervals.success_difference(arm, base)
    assert difference == pytest.approx((0.3, 0.3 - 0.22666, 0.3 + 0.22666), abs=1e-4)


def test_runs_that_agree_by_luck_keep_the_interval_of_their_episodes() -> None:
    difference = intervals.success_difference(records(0.6, 0.6, 0.6), records(0.5, 0.5, 0.5))
    assert difference == pytest.approx(difference_interval((18, 30), (15, 30)))


def test_degrees_of_freedom_are_rounded_down() -> None:
    """By hand: all variance in one arm leaves its own 2 degrees; (0, 1, 2) has variance 1, so sqrt(1 / 3) * 4.303."""
    assert intervals.welch([0, 1, 2], [5, 5, 5]) == pytest.approx((-4, -4 - 2.4843, -4 + 2.4843), abs=1e-3)
    assert intervals.welch([1], [2]) is None
