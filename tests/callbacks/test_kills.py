"""Runs are killed at random moments; each goes on from its last checkpoint and ends as if nothing had happened.

One kill for each number, so that they can be run in parts: `pytest -m long tests/callbacks/test_kills.py -k kill-7`;
further ones with groups, with `max_staleness: 1` and inside the warm-up.
"""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.callbacks.continued_runs import ITERATIONS, MODES, assert_same_chain, assert_same_end, in_processes, turns
from tests.callbacks.signalling import SignalAt

STAGES = ("collect", "score", "update", "validate", "saving")


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "only"),
    [
        *(pytest.param(n, None, id=f"kill-{n}") for n in range(20)),
        *(pytest.param(n, only, id=f"{only}-{n}") for only in ("groups", "ahead", "warmup") for n in range(5)),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, exact_folder: Path, number: int, only: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each mode is killed in four of the stages, one time of four as two processes; iterations 0 and 1 are warm-up."""
    draw = random.Random(number if only is None else f"{only} {number}")
    mode = only if only in MODES else list(MODES)[number % len(MODES)]
    stage = STAGES[(number + number // len(MODES)) % len(STAGES)]
    devices = 2 if number // len(MODES) == 3 else 1
    # in the warm-up, only the first iteration collects and scores; nobody waits for a collection ahead
    iteration = draw.choice([0, 2]) if stage in ("collect", "score") else draw.randrange(ITERATIONS - 1)
    if only == "warmup":
        iteration = 0 if stage in ("collect", "score") else draw.randrange(2)
    rank, done, seconds = draw.randrange(devices), draw.randint(1, 4), draw.uniform(0.0, 0.1)
    place = f"rank {rank} in {stage} of iteration {iteration}, {done} done, {seconds:.3f} s later"
    print(f"\n{mode}, {devices} processes: {place}")

    whole = tmp_path_factory.mktemp("whole")
    assert in_processes(whole, exact_folder, mode, devices=devices) == [0] * devices
    kill = SignalAt(stage, iteration, done, rank, "SIGKILL", seconds)
    codes = in_processes(tmp_path, exact_folder, mode, [kill], devices=devices)
    assert codes[rank] == -signal.SIGKILL
    assert None not in codes, "a process waits for one that was killed"
    saved = tmp_path / "last.ckpt"
    start = saved if saved.exists() else None
    if start is None:  # a run that begins anew has a folder of its own
        shutil.rmtree(tmp_path / "turns", ignore_errors=True)
    assert in_processes(tmp_path, exact_folder, mode, start=start, devices=devices) == [0] * devices
    assert_same_end(whole / "last.ckpt", saved)
    assert turns(whole) == turns(tmp_path)
    assert_same_chain(whole, tmp_path)
