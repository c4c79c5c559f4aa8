"""What each of many processes says that share servers. A module of its own, since processes import it."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_agentrl.engines import VLLMServerEngine
from lightning_agentrl.engines.vllm_server.server import VLLMServer
from tests.engines.test_vllm_engine import handle_of, policy_of, request
from tests.inputs import random_ids

ENVS, TURNS = 4, 3
BEGINNING = random_ids(0, 8 * 32)  # eight blocks that all prompts have in common


def run(rank: int, folder: str, model: str, ranks: int, urls: list[str]) -> None:
    """Play some episodes in one process, and write for each of them which servers were asked."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    engine, asked = VLLMServerEngine(urls, hang_seconds=600), list[tuple[int, str]]()
    engine.start(handle_of(policy_of(Path(model))))
    engine.sync(0)
    generate = VLLMServer.generate

    async def noted(self: VLLMServer, request: Any, *args: Any) -> Any:
        asked.append((request.seed, self.url))
        return await generate(self, request, *args)

    VLLMServer.generate = noted  # type: ignore[method-assign] # of this process only
    asyncio.run(_play(engine, rank))
    episodes = [[url for env, url in asked if env == number] for number in range(ENVS)]
    Path(folder, f"{rank}.json").write_text(json.dumps(episodes))
    dist.barrier()
    engine.stop()
    os._exit(0)


async def _play(engine: VLLMServerEngine, rank: int) -> None:
    """Ask for the first turns at once, which meet, and for the others one after the other, which find their past."""
    prompts = [BEGINNING + random_ids(100 * rank + env, 2 * 32) for env in range(ENVS)]

    async def turn(env: int) -> None:
        asked = request(prompts[env], seed=env, max_tokens=8)
        reply = await engine.generate(replace(asked, number=(ENVS * rank + env, 0)))
        prompts[env] += reply.ids + random_ids(env, 24)

    await asyncio.gather(*map(turn, range(ENVS)))
    for _ in range(1, TURNS):
        for env in range(ENVS):
            await turn(env)
