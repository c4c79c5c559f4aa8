"""How often the host waits for the device while `TransformersEngine` samples, per token.

    python -m benchmarks.gpu_report.host_reads --model demo --device cuda

Counted are operations whose result the host reads: numbers, shapes that depend on values, and copies to main memory. On
a GPU the waits that torch itself notices are counted, too; on a CPU nothing waits, and the first count is what a GPU
would wait for, but for copies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_agentrl.engines import PolicyHandle, SamplingRequest, TransformersEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.types import ModelInput

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
COPIES = {"aten::_to_copy", "aten::copy_"}
PROMPT = 64  # tokens


class HostReads(TorchDispatchMode):
    """Counts what the host reads, in the thread that it is entered in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let FlexAttention, which reads prompts on a GPU, be compiled; nothing in it is read by the host."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in READS or (name in COPIES and result.device.type == "cpu" and _on_a_gpu(args)):
            self.counts[name] += 1
        return result


def _on_a_gpu(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)


class CountedEngine(TransformersEngine):
    """Counts in the thread that samples."""

    def __init__(self, replies: int) -> None:
        super().__init__(max_batch=replies, admission="as_they_come", gather_seconds=1.0)
        self.reads = HostReads()

    def _serve(self) -> None:
        with self.reads:
            super()._serve()


def waits(work: Callable[[], None], device: str) -> int | None:
    """How often torch noticed that the host waited for the GPU; None on a CPU."""
    if device != "cuda":
        work()
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def measure(model: str, device: str, replies: int, tokens: int) -> dict[str, Any]:
    """Sample so many replies at once."""
    policy = LanguageModel(load_causal_lm(model)).eval().to(device)
    engine = CountedEngine(replies)
    engine.start(PolicyHandle(policy, [], nullcontext))
    sampled: list[int] = []

    async def ask() -> None:
        prompts = [ModelInput.of_ids((*range(100, 99 + PROMPT), i)) for i in range(replies)]
        asked = [SamplingRequest(prompt, tokens, 1.0, seed) for seed, prompt in enumerate(prompts)]
        sampled.extend(len(reply.ids) for reply in await asyncio.gather(*map(engine.generate, asked)))

    try:
        engine.sync(0)
        asyncio.run(ask())  # warms up
        engine.reads.counts.clear()
        sampled.clear()
        started = time.perf_counter()
        noticed = waits(lambda: asyncio.run(ask()), device)
        seconds = time.perf_counter() - started
    finally:
        engine.stop()
    count = sum(sampled)
    return {
        "replies": replies,
        "tokens": count,
        "seconds": seconds,
        "reads": dict(engine.reads.counts),
        "reads_per_token": sum(engine.reads.counts.values()) / count,
        "waits_per_token": None if noticed is None else noticed / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--replies", type=int, default=32, help="that are sampled together")
    parser.add_argument("--tokens", type=int, default=64, help="of each")
    wanted = parser.parse_args()
    print(json.dumps(measure(wanted.model, wanted.device, wanted.replies, wanted.tokens)))


if __name__ == "__main__":
    main()
