"""Runs with agent programs are killed at random moments, and go on from their last checkpoint.

One kill for each number, so that they can be run in parts: `pytest -m long tests/callbacks/test_agent_kills.py -k 7`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.continued_runs import ITERATIONS, assert_same_chain, assert_same_end, in_processes, turns
from tests.callbacks.signalling import SignalAt

STAGES = ("collect", "score", "update", "saving")
PATIENCE = 900.0  # seconds for a run, on any machine


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory: pytest.TempPathFactory, exact_folder: Path) -> Callable[[str], Path]:
    """Runs of each mode that are not killed."""

    @cache
    def whole(mode: str) -> Path:
        path = tmp_path_factory.mktemp("whole") / "run"
        path.mkdir()
        assert in_processes(path, exact_folder, mode, seconds=PATIENCE) == [0]
        return path

    return whole


@pytest.mark.long
@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize("number", range(10))
def test_a_killed_run_with_sub_agents_and_compaction_is_equal_to_the_bit(
    tmp_path: Path, exact_folder: Path, whole_runs: Callable[[str], Path], number: int
) -> None:
    killed = _killed(tmp_path, exact_folder, "agents in_turn", number)
    whole = whole_runs("agents in_turn")
    assert_same_end(whole / "last.ckpt", killed / "last.ckpt")
    assert turns(whole) == turns(killed)
    assert_same_chain(whole, killed)


@pytest.mark.long
@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize("number", range(5))
def test_a_killed_run_with_calls_at_once_has_the_same_replies(
    tmp_path: Path, exact_folder: Path, whole_runs: Callable[[str], Path], number: int
) -> None:
    mode = "agents at_once groups"
    killed, whole = (_replies(path) for path in (_killed(tmp_path, exact_folder, mode, number), whole_runs(mode)))
    assert whole.keys() == killed.keys()
    for key, (ids, logps) in whole.items():
        assert killed[key][0] == ids
        assert killed[key][1] == pytest.approx(logps, abs=1e-5)


def _killed(tmp_path: Path, folder: Path, mode: str, number: int) -> Path:
    """Run, kill and resume; return the folder of the run. No process of an agent outlives the trainer."""
    draw = random.Random(f"{mode} {number}")
    stage = STAGES[number % len(STAGES)]
    # iterations 0 and 1 are warm-up, and only the first of them collects and scores
    iteration = draw.choice([0, 2, 3]) if stage in ("collect", "score") else draw.randrange(ITERATIONS - 1)
    done, seconds = (
        draw.randint(1, (6 if "groups" in mode else 20) if stage == "collect" else 4),
        draw.uniform(0.0, 0.2),
    )
    print(f"\n{mode}: in {stage} of iteration {iteration}, {done} done, {seconds:.3f} s later")
    killed = tmp_path / "killed"
    killed.mkdir()
    kill = SignalAt(stage, iteration, done, 0, "SIGKILL", seconds)
    assert in_processes(killed, folder, mode, [kill], seconds=PATIENCE) == [-signal.SIGKILL]
    print(f"{_last_gone(killed / 'pids'):.2f} s until the last agent was gone")
    saved = killed / "last.ckpt"
    start = saved if saved.exists() else None
    if start is None:
        shutil.rmtree(killed / "turns", ignore_errors=True)
    assert in_processes(killed, folder, mode, start=start, seconds=PATIENCE) == [0]
    return killed


def _last_gone(pids: Path) -> float:
    """Wait until no process of an agent is left, and return the seconds that it took."""
    began = time.monotonic()
    started = [int(path.name) for path in pids.iterdir()]
    assert started
    while any(_runs(pid) for pid in started):
        assert time.monotonic() - began < PATIENCE, "a process of an agent is left"
        time.sleep(0.05)
    return time.monotonic() - began


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"warm.py" in Path(f"/proc/{pid}/cmdline").read_bytes() if Path(f"/proc/{pid}").exists() else False


def _replies(path: Path) -> dict[tuple[Any, ...], tuple[list[int], list[float]]]:
    """Return ids and log-probs of each reply by its iteration, episode, call and occurrence; none is there twice."""
    found = {}
    for record in turns(path):
        key = tuple(record[name] for name in ("iteration", "group", "env", "episode", "call"))
        assert key not in found
        found[key] = record["reply_ids"], record["rollout_logps"]
    return found
