"""How an update of servers ends on each of two processes, if it fails on one. Processes import this module."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_agentrl.engines import PolicyHandle, VLLMServerEngine
from lightning_agentrl.engines.vllm_server.engine import BackgroundLoop
from lightning_agentrl.errors import ConfigError


class Shared:
    """An empty folder in place of weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, policy: Any, version: str) -> Path:
        return self.folder


class Pool:
    """Of no server; it takes weights, or finds that its servers do not."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    async def pause(self) -> None:
        pass

    async def update(self, weights: Any) -> None:
        if self.fails:
            raise ConfigError("the server has another model")


def run(rank: int, folder: str) -> None:
    """Update twice: once it fails on the first process, once on the second."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for failing in (0, 1):
        engine: Any = VLLMServerEngine(["http://127.0.0.1:1"])
        policy: Any = nn.Module()
        policy.lm = None
        engine._loop, engine._handle = BackgroundLoop(), PolicyHandle(policy, (), nullcontext)
        engine._pool, engine._shared = Pool(rank == failing), Shared(Path(folder)) if rank == 0 else None
        try:
            engine.sync(1)
            outcome = "updated"
        except ConfigError as error:
            outcome = str(error)
        Path(folder, f"{failing}-{rank}.txt").write_text(outcome)
        engine._loop.stop()
    dist.destroy_process_group()
