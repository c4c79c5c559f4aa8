"""Equal seeds give equal runs, to the bit, however long environments take and however busy the machine is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.repeated import KINDS, busy, run


@pytest.mark.slow
def test_two_runs_are_equal_to_the_bit(tiny_folder: Path) -> None:
    """The kind in which most happens at the same time."""
    first = run("asynchronous", tiny_folder)
    with busy(1):
        assert run("asynchronous", tiny_folder) == first


@pytest.mark.long
def test_ten_runs_have_one_result(tiny_folder: Path) -> None:
    """Each in a process of its own with another order of sets, and every other one with a busy loop beside it."""
    results: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for number in range(10):
        with busy(number % 2):
            done = subprocess.run(
                [sys.executable, "-m", "tests.agents.repeated", str(tiny_folder)],
                cwd=Path(__file__).parents[2],
                env=os.environ | {"PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": "2"},
                capture_output=True,
                text=True,
            )
        assert done.returncode == 0, done.stderr[-3000:]
        for kind, result in json.loads(done.stdout.strip().splitlines()[-1]).items():
            results[kind].add(json.dumps(result))
    assert {kind: len(found) for kind, found in results.items()} == dict.fromkeys(KINDS, 1), results
