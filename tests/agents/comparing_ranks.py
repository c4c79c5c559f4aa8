"""How a comparison ends on each of two processes, if something happens on one; imported by these processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_agentrl.engines import Reply, SamplingRequest
from lightning_agentrl.errors import EngineGoneError
from lightning_agentrl.rollout.stopping import Stopping
from tests.agents.test_engine_comparison import comparing, family
from tests.engines.plain import PlainEngine

CASES = ["all is well", "the engine is gone", "the engine fails", "a signal comes"]


class Happening(PlainEngine):
    """Something happens where a reply is asked for."""

    def __init__(self, case: str, stopping: Stopping) -> None:
        super().__init__()
        self.case, self.stopping = case, stopping

    async def generate(self, request: SamplingRequest) -> Reply:
        if self.case == "the engine is gone":
            raise EngineGoneError("no server")
        if self.case == "the engine fails":
            raise ValueError("broken")
        if self.case == "a signal comes":
            self.stopping.ask(signal.SIGTERM)
        return await super().generate(request)


def ending(case: str, rank: int) -> str:
    """How the work ends here, if something happens on the second process."""
    stopping = Stopping()
    stopping.begin(lambda: None)
    try:
        with comparing(Happening(case if rank else "", stopping), family("qwen3")) as comparison:
            comparison.stopping = stopping
            with stopping.together():
                return f"fits: {all(found.seen.fits for found in comparison.rounds(2, 0))}"
    except (SystemExit, ValueError) as end:
        return f"{type(end).__name__}: {end} {stopping.reason}".strip()


def run(rank: int, folder: str) -> None:
    """The work of one of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    endings = {}
    for case in CASES:
        endings[case] = ending(case, rank)
        dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(endings))
    dist.destroy_process_group()
