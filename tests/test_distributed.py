"""What the processes of a run agree on, with real ones."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

RANKS = """
import json, multiprocessing, sys
import torch.distributed as dist
from lightning_agentrl.distributed import raise_once

def endings(rank):
    return {faults: ending(rank, faults) for faults in json.loads(sys.argv[1])}

def ending(rank, faults):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/{faults}", rank=rank, world_size=3)
    try:
        with raise_once():
            if fault := faults.split(",")[rank]:
                raise SystemExit(fault) if fault == "leaves" else ValueError(fault)
        return "goes on"
    except (ValueError, SystemExit) as end:
        return repr(end)
    finally:
        dist.barrier()  # gloo aborts a process whose neighbour leaves earlier
        dist.destroy_process_group()

with multiprocessing.get_context("fork").Pool(3) as ranks:  # torch is imported once
    print(json.dumps(ranks.map(endings, range(3), chunksize=1)))
"""
LEAVE = ["_ToldElsewhere(0)", "_ToldElsewhere(2)"]  # after an error that another rank tells, and without one
CASES = {
    "same,same,same": ["ValueError('same')", LEAVE[0], LEAVE[0]],
    ",alone,": [LEAVE[1], "ValueError('alone')", LEAVE[1]],
    "one,other,one": ["ValueError('one')", "ValueError('other')", LEAVE[0]],
    ",,leaves": [LEAVE[1], LEAVE[1], "SystemExit('leaves')"],
    ",,": ["goes on"] * 3,
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """How the work of each of three processes ends in each case."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-c", RANKS, json.dumps(list(CASES)), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("faults", CASES)
def test_what_ranks_refuse_is_told_once_and_nobody_goes_on_alone(faults: str, endings: list[dict[str, str]]) -> None:
    assert [of_rank[faults] for of_rank in endings] == CASES[faults]
