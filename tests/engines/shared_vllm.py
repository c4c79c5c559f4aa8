"""What each of several processes that share one vLLM says. A module of its own, since processes import it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_agentrl.engines import Reply, VLLMEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.lora import LoRA
from tests.engines.test_vllm_engine import MIXED, handle_of, policy_of, request, serve, trained_logps
from tests.inputs import random_ids
from tests.moving import move

VERSIONS = 3


def adapted(policy: LanguageModel) -> LanguageModel:
    """With the same new adapters in every process, as DDP would see to."""
    torch.manual_seed(0)
    return LanguageModel(LoRA(rank=4).adapt(policy.lm, "actor"))


def updates(engine: VLLMEngine, policy: LanguageModel, share: slice = slice(None)) -> list[list[dict[str, Any]]]:
    """Replies to a share of the mixed requests under several weights, and their gap to the trainer."""
    of_versions = []
    for version in range(VERSIONS):
        engine.sync(version)
        with engine.collecting():
            replies = serve(engine, MIXED[share])
        of_versions.append([plain(reply) for reply in replies])
        for asked, reply, line in zip(MIXED[share], replies, of_versions[-1], strict=True):
            own = trained_logps(policy, asked, reply)
            line["gap"] = max(abs(a - b) for a, b in zip(reply.logps, own, strict=True))
        move(policy, seed=version, share=0.1)
    return of_versions


def plain(reply: Reply) -> dict[str, Any]:
    return {"ids": list(reply.ids), "logps": list(reply.logps), "version": reply.policy_version}


async def episodes(engine: VLLMEngine, rank: int) -> list[list[list[int]]]:
    """Three environments of six turns on the first rank, a single turn on the others; some steps take time."""

    async def play(env: int, turns: int) -> list[list[int]]:
        replies = []
        for turn in range(turns):
            asked = request(random_ids(env, 3 + turn), seed=10 * env + turn, max_tokens=1 + (env + turn) % 5)
            replies.append(list((await engine.generate(asked)).ids))
            await asyncio.sleep(0.02 * (turn % 2))
        return replies

    of_rank = [(0, 6), (1, 6), (2, 6)] if rank == 0 else [(2 + rank, 1)]
    return await asyncio.gather(*(play(*each) for each in of_rank))


async def take_back(engine: VLLMEngine) -> None:
    late = asyncio.create_task(engine.generate(request(random_ids(5, 3), max_tokens=390)))
    await engine.generate(request(random_ids(6, 3), max_tokens=1))
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)


def error_of(do: Callable[[], Any]) -> str:
    try:
        do()
    except Exception as error:  # noqa: BLE001 - looked at by the test
        return f"{type(error).__name__}: {error}"
    return ""


def run(rank: int, folder: str, model: str, world: int, size: int) -> None:
    """The work of one process: ``world`` of them in groups of ``size``."""
    torch.set_num_threads(1)
    # they meet in a file, so no port can be taken
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    work = Work(rank, model, size)
    for kind in [work.plain, work.adapters, work.dies] if world == size else [work.other_groups]:
        kind()
        Path(folder, f"{rank}.json").write_text(json.dumps(work.report))
    os._exit(0)  # gloo aborts a process that ends after another one of its group has died


class Work:
    """Of one rank."""

    def __init__(self, rank: int, model: str, size: int) -> None:
        self.rank, self.model, self.size = rank, Path(model), size
        self.report: dict[str, Any] = {}

    def start(self, lora: bool = False) -> tuple[VLLMEngine, LanguageModel]:
        policy = policy_of(self.model)
        policy = adapted(policy) if lora else policy
        engine = VLLMEngine(kv_cache_gb=0.05, tensor_parallel=self.size)
        engine.start(handle_of(policy))
        return engine, policy

    def plain(self) -> None:
        self.report["three"] = error_of(VLLMEngine(tensor_parallel=3).check)
        odd = policy_of(self.model)
        odd.lm.config.num_attention_heads = 3
        self.report["heads"] = error_of(lambda: VLLMEngine(tensor_parallel=2).start(handle_of(odd)))
        engine, policy = self.start()
        self.report["parts"] = engine._thread.call(parts)
        self.report["updates"] = updates(engine, policy, slice(self.rank, None, self.size))
        exchanges = counted(engine)
        self.report["episodes"] = self.collect(engine, lambda: asyncio.run(episodes(engine, self.rank)))
        exchanges.clear()
        self.collect(engine, lambda: asyncio.run(take_back(engine)) if self.rank else None)
        self.report["taken back after"] = len(exchanges)
        exchanges.clear()
        self.collect(engine, lambda: time.sleep(0.5))
        self.report["idle"] = len(exchanges)
        self.report["outside"] = error_of(lambda: serve(engine, MIXED[:1]))
        self.report["within"] = self.collect(engine, lambda: error_of(lambda: engine.sync(9)))
        self.report["fails"] = error_of(lambda: self.collect(engine, lambda: self.fails(engine)))
        self.report["after"] = error_of(lambda: engine.sync(9))
        dist.barrier()
        engine.stop()

    def adapters(self) -> None:
        """With the next engine after one that failed; it stays for what comes then."""
        self.engine, policy = self.start(lora=True)
        self.report["adapters"] = updates(self.engine, policy, slice(self.rank, None, self.size))

    def other_groups(self) -> None:
        """One group stays longer than the other, which has nothing more to do."""
        engine, policy = self.start()
        self.report["updates"] = updates(engine, policy, slice(self.rank, None, dist.get_world_size()))
        if self.rank < self.size:
            self.report["episodes"] = self.collect(engine, lambda: asyncio.run(episodes(engine, self.rank)))
        dist.barrier()
        engine.stop()

    def dies(self) -> None:
        """The last rank, without a word."""

        def play() -> None:
            if self.rank == self.size - 1:
                os._exit(0)
            time.sleep(0.5)  # not inside a step, which would wait for the dead
            serve(self.engine, MIXED)

        self.report["dies"] = error_of(lambda: self.collect(self.engine, play))

    def collect(self, engine: VLLMEngine, do: Callable[[], Any]) -> Any:
        with engine.collecting():
            return do()

    def fails(self, engine: VLLMEngine) -> None:
        if self.rank:
            time.sleep(0.1)
            raise ZeroDivisionError("a bug of the environment")
        serve(engine, [request(random_ids(5, 3), max_tokens=390)] * 50)


def counted(engine: VLLMEngine) -> list[int]:
    """One entry for each exchange of the group from now on."""
    exchanges: list[int] = []
    thread: Any = engine._thread
    exchange = thread._exchange

    def count(*said: Any) -> Any:
        exchanges.append(1)
        return exchange(*said)

    thread._exchange = count
    return exchanges


def parts(engine: Any) -> dict[str, int]:
    """What this process has of the model: rows of the embedding, attention heads, and heads of keys and values."""
    model = engine.model_executor.driver_worker.model_runner.model.model
    attention = model.layers[0].self_attn
    return {
        "rows": model.embed_tokens.weight.shape[0],
        "heads": attention.num_heads,
        "shared heads": attention.num_kv_heads,
    }
