"""What rounding explains of a gap between engine and trainer."""

from __future__ import annotations

import math

import pytest

from lightning_agentrl.metrics.gap import EXACT, MOST_LARGEST, MOST_MEAN, ROUGH, Bounds, GapWatch


@pytest.mark.parametrize("bounds", [EXACT, ROUGH])
def test_the_rounding_of_a_policy_widens_bounds_and_never_narrows_them(bounds: Bounds) -> None:
    assert bounds.widened(0.0, 0.0) == bounds
    assert bounds.widened(0.14, 1.5) == Bounds(0.28, 4.5)


@pytest.mark.parametrize("bounds", [EXACT, ROUGH])
def test_what_is_too_large_for_rounding_or_not_a_number_is_not_taken_for_it(bounds: Bounds) -> None:
    assert bounds.widened(3.0, 50.0) == Bounds(MOST_MEAN, MOST_LARGEST)
    for mean, largest in ((math.nan, math.nan), (math.inf, math.inf), (0.14, math.inf), (math.inf, 1.5)):
        assert bounds.widened(mean, largest) == bounds


@pytest.mark.parametrize(
    ("mean", "largest", "within"),
    [(0.1, 0.8, True), (0.11, 0.8, False), (0.1, 0.81, False), (math.nan, 0.1, False), (0.01, math.nan, False)],
)
def test_both_the_mean_and_the_largest_gap_lie_within_bounds(mean: float, largest: float, within: bool) -> None:
    assert Bounds(0.1, 0.8).hold(mean, largest) == within


def test_a_gap_of_a_tenth_of_what_rounding_explains_is_no_jump() -> None:
    for mean, verdict in ((0.005, ""), (0.0051, "jump")):
        watch = GapWatch(Bounds(mean=0.05, largest=1.0))
        assert watch.judge(1e-6, older=False) == ""
        assert watch.judge(mean, older=False) == verdict


def test_a_gap_is_measured_against_the_latest_ones() -> None:
    watch = GapWatch(Bounds(mean=0.05, largest=1.0))
    for mean in [0.001] * 20 + [0.004] * 8:
        assert watch.judge(mean, older=False) == ""
    assert watch.judge(0.015, older=False) == ""  # fifteen times the first ones
    assert watch.usual == 0.004
    assert watch.judge(0.021, older=False) == "jump"


def test_gaps_of_older_weights_are_measured_against_such_gaps_alone() -> None:
    watch = GapWatch(Bounds(mean=0.05, largest=1.0))
    assert watch.judge(0.001, older=False) == watch.judge(0.2, older=True) == watch.judge(0.3, older=True) == ""
    assert watch.judge(math.nan, older=True) == ""
    assert watch.judge(0.3, older=False) == "beyond"
    assert watch.judge(3.0, older=True) == "jump"
