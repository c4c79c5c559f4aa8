"""The table of estimators: its numbers by hand, and that nothing in it was written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.estimators.noise import bootstrap, cosine, mean_product, relative_variance
from benchmarks.estimators.report import BASELINE, KEPT, NOT_KEPT, page, reading, write

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
    def row(value: float, low: float, high: float) -> dict[str, dict[str, float]]:
        return {"variance": {"value": value}, "ratio": {"value": value, "low": low, "high": high}}

    rows = {"RLOO": row(1, 1, 1), "a": row(0.5, 0.4, 0.6), "b": row(0.7, 0.4, 1.2), "c": row(2, 1.5, 3)}
    told = reading(rows).replace("\n", " ")
    assert told.startswith("*a* has the lowest relative variance.")
    assert "*a* is below RLOO and *c* is above it." in told
    assert told.endswith(NOT_KEPT)
    assert reading({**rows, BASELINE: row(0.6, 0.5, 0.7)}).replace("\n", " ").endswith(KEPT)


def test_the_page_of_the_repository_is_that_of_its_records(tmp_path: Path) -> None:
    records = json.loads((RESULTS / "estimators.json").read_text())
    assert page(records) == (RESULTS / "estimators.md").read_text()
    write(records, tmp_path / "estimators.json")
    assert json.loads((tmp_path / "estimators.json").read_text()) == records
