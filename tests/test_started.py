"""Processes that the tests start import nothing that takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.started import IMPORTED, outcomes


def imported(rank: int) -> None:
    print(*sorted(name for name in IMPORTED if name in sys.modules), flush=True)


def in_a_folder_of_its_own(path: Path) -> None:
    """Once the working folder is another one, in which no module is."""
    assert outcomes(1, imported, folder=path) == [(0, " ".join(sorted(IMPORTED)) + "\n")]


@pytest.mark.slow
def test_they_have_imported_all_wherever_the_first_of_them_is_started(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[1])
    program = (
        f"import os, sys, pathlib; sys.path.insert(0, {root!r}); os.chdir({str(tmp_path)!r}); "
        "from tests.test_started import in_a_folder_of_its_own; in_a_folder_of_its_own(pathlib.Path.cwd())"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=variables)
