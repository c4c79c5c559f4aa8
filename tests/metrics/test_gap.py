"""What rounding explains of a gap between engine and trainer."""

from __future__ import annotations

import math

import pytest

from lightning_agentrl.metrics.gap import EXACT, MOST_LARGEST, MOST_MEAN, ROUGH, Bounds


@pytest.mark.parametrize("bounds", [EXACT, ROUGH])
def test_the_rounding_of_a_policy_widens_bounds_and_never_narrows_them(bounds: Bounds) -> None:
    assert bounds.widened(0.0, 0.0) == bounds
    assert bounds.widened(0.14, 1.5) == Bounds(0.28, 4.5)


@pytest.mark.parametrize("bounds", [EXACT, ROUGH])
def test_what_is_too_large_for_rounding_or_not_a_number_is_not_taken_for_it(bounds: Bounds) -> None:
    assert bounds.widened(3.0, 50.0) == Bounds(MOST_MEAN, MOST_LARGEST)
    for mean, largest in ((math.nan, math.nan), (math.inf, math.inf), (0.14, math.inf)):
        assert bounds.widened(mean, largest) == bounds
