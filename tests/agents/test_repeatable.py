"""Equal seeds give equal runs, to the bit, however long environments take and however busy the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.repeated import KINDS, busy, run

RUNS = 10


@pytest.mark.slow
def test_two_runs_are_equal_to_the_bit(tiny_folder: Path) -> None:
    """The kind in which most happens at the same time."""
    first = run("asynchronous", tiny_folder)
    with busy(1):
        assert run("asynchronous", tiny_folder) == first


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_ten_runs_have_one_result(kind: str, tiny_folder: Path) -> None:
    """Each is a process of its own with another order of sets; every other one has busy loops beside it."""
    results = set()
    for number in range(RUNS):
        with busy(2 * (number % 2)):
            done = subprocess.run(
                [sys.executable, "-m", "tests.agents.repeated", kind, str(tiny_folder)],
                cwd=Path(__file__).parents[2],
                env=os.environ | {"PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "2"},
                capture_output=True,
                text=True,
                check=True,
            )
        results.add(done.stdout.strip().splitlines()[-1])
    assert len(results) == 1, "\n".join(sorted(results))
    assert set(json.loads(results.pop())) == {"what happened", "weights", "optimizer"}
