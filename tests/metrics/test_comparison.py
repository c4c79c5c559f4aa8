"""pass@k against combinations, and bootstrap intervals against what they must be by hand."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest

from lightning_agentrl.metrics.comparison import bootstrap_interval, pass_at_k


def outcomes(successes: int, samples: int) -> np.ndarray:
    return np.arange(samples) < successes


@pytest.mark.parametrize(("successes", "samples", "k", "expected"), [(1, 4, 2, 0.5), (2, 5, 3, 0.9), (0, 3, 3, 0.0)])
def test_pass_at_k_by_hand(successes: int, samples: int, k: int, expected: float) -> None:
    """One of four: C(3, 2) / C(4, 2) = 1 / 2. Two of five: C(3, 3) / C(5, 3) = 1 / 10."""
    assert pass_at_k(outcomes(successes, samples), k) == pytest.approx(expected)


def test_pass_at_k_is_the_share_of_draws_with_a_success() -> None:
    for samples in range(1, 7):
        for successes in range(samples + 1):
            one = outcomes(successes, samples)
            for k in range(1, samples + 1):
                drawn = [any(one[list(chosen)]) for chosen in combinations(range(samples), k)]
                assert pass_at_k(one, k) == pytest.approx(np.mean(drawn))
                assert pass_at_k(one, k) == pytest.approx(1 - comb(samples - successes, k) / comb(samples, k))


def test_pass_at_k_keeps_the_axes_before_the_episodes() -> None:
    random = np.random.default_rng(0).random((2, 3, 5, 400)) < 0.3
    assert pass_at_k(random, 4).shape == (2, 3, 5)
    assert np.allclose(pass_at_k(random, 1), random.mean(-1))
    assert (np.diff([pass_at_k(random, k).mean() for k in (1, 2, 50, 400)]) > 0).all()
    with pytest.raises(ValueError, match="pass@401 needs 1 <= k <= 400"):
        pass_at_k(random, 401)


def test_interval_of_two_seeds_by_hand() -> None:
    """Draws of two seeds, 0 and 1, have the mean 0 in a quarter of the cases, and 1 in another."""
    assert bootstrap_interval(np.array([[0.0, 1.0]])) == (0.0, 1.0)
    assert bootstrap_interval(np.array([[0.0, 1.0]]), level=0.4) == (0.5, 0.5)


def test_interval_of_many_seeds_is_that_of_the_normal_distribution() -> None:
    x_ES = np.random.default_rng(1).normal(3.0, 2.0, (1, 500))
    low, high = bootstrap_interval(x_ES)
    half = 1.96 * x_ES.std() / np.sqrt(500)
    assert (low, high) == pytest.approx((x_ES.mean() - half, x_ES.mean() + half), abs=0.03 * 2 * half)


def test_interval_follows_shift_and_scale() -> None:
    x_ES = np.random.default_rng(2).random((3, 20))
    low, high = bootstrap_interval(x_ES)
    assert bootstrap_interval(2 * x_ES - 5) == pytest.approx((2 * low - 5, 2 * high - 5))


def test_environments_count_alike_and_add_their_variances() -> None:
    one = np.random.default_rng(3).normal(0.0, 1.0, (1, 300))
    low, high = bootstrap_interval(one)
    both = bootstrap_interval(np.concatenate([one, np.full((1, 300), 10.0)]))
    assert both == pytest.approx((5 + low / 2, 5 + high / 2), abs=0.01)
    twice = bootstrap_interval(np.concatenate([one, one]))
    assert twice[1] - twice[0] == pytest.approx((high - low) / np.sqrt(2), rel=0.05)


def test_pairing_removes_what_seeds_have_in_common() -> None:
    random = np.random.default_rng(4)
    level = random.normal(0.0, 5.0, (1, 200))
    better, worse = level + 0.3 + random.normal(0, 0.1, (1, 200)), level
    low, high = bootstrap_interval(better - worse)
    assert 0.25 < low < 0.3 < high < 0.35
    alone = bootstrap_interval(better)
    assert alone[1] - alone[0] > 10 * (high - low)
    assert bootstrap_interval(level - level) == (0.0, 0.0)
