"""The comparison of two versions by turns: both really train, and the ratio is that of neighbours in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.laboratory.cloning import Start
from benchmarks.laboratory.turns_per_second import FIRST, Case, Times, contender, one_iteration, page
from lightning_agentrl.models.words import word_model

ROOT = Path(__file__).resolve().parents[1]


def test_a_ratio_is_that_of_neighbours() -> None:
    mine, other = Times([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]), Times([2.0, 4.0, 2.0], [3.0, 3.0, 3.0])
    row = page({Case(1): (mine, other)}, "0123456789ab").splitlines()[-1]
    assert row.split(" | ") == ["| 1 word", "256", "256", "2.00 (0.50 to 2.00)", "3.00 (3.00 to 3.00) |"]


@pytest.mark.slow
def test_a_version_trains_when_it_is_told_to(tmp_path: Path) -> None:
    with contender(ROOT, Case(1), word_model(Start().words, tmp_path), FIRST + 1) as process:
        for _ in range(FIRST + 1):
            clock, processor = one_iteration(process)
            assert clock > 0
            assert processor > 0
        assert process.wait() == 0
