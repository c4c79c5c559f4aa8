"""The walk of one training iteration stays short; the numbers may only fall."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.code_lines import code_lines

ROOT = Path(__file__).parents[1]
# To be read in this order to understand an iteration; the last ones beside the others.
SPINE = (
    *("rollout/data_module", "rollout/stream", "rollout/collector", "episodes/session", "episodes/interaction"),
    *("prompts/renderer", "engines/transformers/engine", "agents/agent", "agents/scoring", "models/language_model"),
    *("advantages/gae", "agents/update", "agents/ppo", "agents/optim", "episodes/env_worker", "episodes/contract"),
    *("engines/transformers/batch", "models/packing", "models/prefix_tree", "losses/ppo", "types/rollout"),
)
FILES, FUNCTIONS, LINES, PAIRS, FILES_BEFORE = 64, 545, 2_080, 162, 77
SPINE_LINES, SPINE_SHARE = 3_808, 0.5


@pytest.mark.slow
def test_an_iteration_without_callbacks_stays_short() -> None:
    ended = subprocess.run([sys.executable, "-m", "tests.walk"], cwd=ROOT, capture_output=True, text=True, check=True)
    walk = json.loads(ended.stdout.splitlines()[-1])
    lines = walk["lines"]
    assert walk["files"] <= FILES
    assert walk["functions"] <= FUNCTIONS
    assert sum(lines.values()) <= LINES
    assert walk["pairs"] <= PAIRS
    assert walk["files_before"] <= FILES_BEFORE
    assert sum(lines.get(f"{name}.py", 0) for name in SPINE) >= SPINE_SHARE * sum(lines.values())


def test_the_spine_can_be_read() -> None:
    paths = [ROOT / "lightning_agentrl" / f"{name}.py" for name in SPINE]
    assert sum(code_lines(path) for path in paths) <= SPINE_LINES
