"""Seconds until an engine has new weights and can sample from them.

    python -m benchmarks.gpu_report.weight_updates vllm --model demo    # also: folder, gloo, nccl, to a server

A server is started for it; where there are two GPUs it gets the second one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast, get_args

import torch

from lightning_agentrl.engines import Engine, PolicyHandle, VLLMEngine, VLLMServerEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from lightning_agentrl.models.names import resolve_model
from lightning_agentrl.vllm_worker.options import Transfer
from tests.engines.servers import SMALL, ServerProcess
from tests.moving import move

SHARE = "0.3"  # of the memory of a GPU
ON_GPU = ("--dtype", "bfloat16", "--gpu-memory-utilization", SHARE, "--enforce-eager", "--max-model-len", "1024")


@contextmanager
def engine_for(way: str, model: str, device: str) -> Iterator[Engine]:
    """An engine that is sent weights this way; its server lives as long."""
    if way == "vllm":
        yield VLLMEngine(gpu_memory_utilization=float(SHARE), kv_cache_gb=0.1)
        return
    transfer = cast(Transfer, way)
    if device == "cuda" and torch.cuda.device_count() > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # of the server; this process has chosen its own
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "server.log")
        server = ServerProcess(Path(resolve_model(model)), log, ON_GPU if device == "cuda" else SMALL, transfer)
        server.start()
        try:
            server.wait()
            yield VLLMServerEngine([server.url], transfer=transfer)
        finally:
            server.kill()


def measure(way: str, model: str, device: str, repeats: int) -> dict[str, Any]:
    """Of weights that have all changed; the first update, which also prepares the way, does not count."""
    policy = LanguageModel(load_causal_lm(model)).eval().to(device)
    precision = partial(torch.autocast, device, torch.bfloat16) if device == "cuda" else nullcontext
    handle = PolicyHandle(policy, [], precision, max_model_len=1024)
    seconds = []
    with engine_for(way, model, device) as engine:
        engine.start(handle)
        try:
            for version in range(repeats + 1):
                move(policy, seed=version)
                if device == "cuda":
                    torch.cuda.synchronize()
                started = time.perf_counter()
                engine.sync(version)
                with engine.collecting():
                    seconds.append(time.perf_counter() - started)
        finally:
            engine.stop()
    size = sum(p.numel() for p in policy.parameters()) * handle.computes_in.itemsize
    return {"bytes": size, "first": seconds[0], "seconds": seconds[1:], "median": median(seconds[1:])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=("vllm", *get_args(Transfer)))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    wanted = parser.parse_args()
    print(json.dumps(measure(wanted.way, wanted.model, wanted.device, wanted.repeats)))


if __name__ == "__main__":
    main()
