"""What the processes of a run agree on, with real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANKS = """
import sys
import torch.distributed as dist
from lightning_agentrl.distributed import raise_once

rank, store, faults = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(faults))
try:
    with raise_once():
        if faults[rank]:
            raise ValueError(faults[rank])
    print("goes on")
finally:
    dist.destroy_process_group()  # else gloo may abort a process that ends after its neighbours
"""


@pytest.mark.parametrize(
    ("faults", "codes", "said"),
    [
        ("same,same,same", [1, 0, 0], ["ValueError: same", "", ""]),
        (",alone", [2, 1], ["", "ValueError: alone"]),
        ("one,other", [1, 1], ["ValueError: one", "ValueError: other"]),
        (",", [0, 0], ["goes on", "goes on"]),
    ],
)
def test_what_ranks_refuse_is_told_once_and_nobody_goes_on_alone(
    faults: str, codes: list[int], said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [sys.executable, str(tmp_path / "ranks.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), faults], **pipes) for rank in range(len(codes))
    ]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == codes
    for text, part in zip(told, said, strict=True):
        assert part in text
        assert ("ValueError" in text) == ("ValueError" in part)
