"""Noise of gradients: its numbers by hand, what is read in them, and a page that is of its records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.laboratory.gradients import page, reading
from benchmarks.laboratory.noise import bootstrap, cosine, mean_product, relative_variance

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float64)


def test_signal_and_noise_by_hand() -> None:
    """Gradients (2, 1), (2, -1), (3, 0): products of different rollouts are 3, 6 and 6, so a signal of 5; squared norms
    are 5, 5 and 9, so a power of 19 / 3.
    """
    g_MD = torch.tensor([[2.0, 1.0], [2.0, -1.0], [3.0, 0.0]], dtype=torch.float64)
    products = g_MD @ g_MD.T
    assert float(mean_product(products, ones(3))) == pytest.approx(5)
    assert float(relative_variance(products, ones(3))) == pytest.approx((19 / 3 - 5) / 5)
    assert float(cosine(products, products, products, ones(3))) == pytest.approx(1)
    assert float(cosine(products, products, -products, ones(3))) == pytest.approx(-1)


def test_a_rollout_that_counts_twice_makes_no_pair_with_itself() -> None:
    """Of (1, 0) twice and (0, 1) once all pairs of different ones are orthogonal."""
    products = torch.eye(2, dtype=torch.float64)
    assert float(mean_product(products, torch.tensor([2.0, 1.0], dtype=torch.float64))) == 0


def test_the_variance_of_known_gradients_lies_in_its_interval() -> None:
    """Mean (3, 0, ...) and unit variance in each of 20 dimensions: 20 / 9."""
    torch.manual_seed(1)
    g_MD = torch.randn(200, 20, dtype=torch.float64)
    g_MD[:, 0] += 3
    products = g_MD @ g_MD.T
    interval = bootstrap(lambda counts_M: relative_variance(products, counts_M), 200, resamples=400)
    assert interval.low < 20 / 9 < interval.high
    assert interval.low < interval.value < interval.high
    assert interval.high - interval.low < 1


def test_what_is_read_follows_from_the_intervals() -> None:
    def row(low: float, high: float, cosine_high: float) -> dict[str, dict[str, float]]:
        return {"ratio": {"low": low, "high": high}, "exact": {"high": cosine_high}}

    rows = {"RLOO": row(1, 1, 1), "a": row(0.4, 0.6, 0.9), "b": row(0.4, 1.2, 1.01), "c": row(1.5, 3, 1)}
    text = reading(rows).replace("\n", " ")
    assert "*a* has a lower relative variance than RLOO, and *c* a higher one." in text
    assert text.endswith("Away from the exact direction points *a*.")


def test_the_page_of_the_repository_is_that_of_its_records() -> None:
    records = json.loads((RESULTS / "gradients.json").read_text())
    assert page(records) == (RESULTS / "gradients.md").read_text()
