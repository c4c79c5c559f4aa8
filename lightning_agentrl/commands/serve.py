"""`agentrl serve`: start a vLLM server with the options that `VLLMServerEngine` requires."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata

import torch

from lightning_agentrl.errors.vllm_version import check_installed
from lightning_agentrl.vllm_worker.extension import CPU_BLOCK, CPU_OPS, EXTENSION, MODE

DEV_MODE = "VLLM_SERVER_DEV_MODE"  # without this variable, a server does not accept weights
SPAWN = "VLLM_WORKER_MULTIPROC_METHOD"  # without spawn, the engine's processes may not import `server_process`
PROCESS = "lightning_agentrl.vllm_worker.server_process"
KV_CACHE_BYTES = 2**30  # on a CPU; vLLM's default is most of the memory


def server_command(model: str, port: int, host: str, options: Sequence[str], on_cpu: bool) -> list[str]:
    """Return the command line of a server; later options override earlier options.

    Args:
        model: folder or hub id of the model.
        port: port to listen on.
        host: address to listen on.
        options: further options of ``vllm serve``.
        on_cpu: whether the server runs without a GPU.
    """
    fixed = ["--host", host, "--port", str(port), "--enable-scale-out", "--logprobs-mode", MODE]
    fixed += ["--worker-extension-cls", EXTENSION]
    fixed += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    for_cpu = ["--enforce-eager", "--dtype", "bfloat16", "--block-size", str(CPU_BLOCK)]
    for_cpu.append("--no-enable-chunked-prefill")  # `start_vllm` also disables chunked prefill on a CPU
    for_cpu += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--compilation-config", json.dumps(CPU_OPS)]
    return [sys.executable, "-m", PROCESS, *_entry(model), *fixed, *(for_cpu if on_cpu else []), *options]


def _entry(model: str) -> list[str]:
    """Return module and arguments of ``vllm serve`` or, for the CPU build, whose command fails, of the API server."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ["vllm.entrypoints.launchers.api_server.entry", "--model", model]
    return ["vllm.entrypoints.cli.main", "serve", model]


def serve_model(model: str, port: int = 8001, host: str = "127.0.0.1", options: Sequence[str] = ()) -> None:
    """Start a vLLM server for VLLMServerEngine; options after -- go to vLLM, such as -- --tensor-parallel-size 2.

    The server replaces this process.

    Args:
        model: hub id or folder of the model, or demo; use the same value as in the config of the run.
        port: port to listen on.
        host: address to listen on. Every client can call worker methods and send weights, so use this machine or a
            private network.
        options: options of vLLM.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: vLLM's version is not supported.
    """
    check_installed("agentrl serve")
    on_cpu = not torch.cuda.is_available()
    if model in ("demo", "demo-tools"):
        from lightning_agentrl.models.loading import (
            resolve_model,  # importing transformers takes seconds, and only the demo models need transformers
        )

        model = resolve_model(model)
    command = server_command(model, port, host, options, on_cpu)
    print(f"{DEV_MODE}=1 {SPAWN}=spawn {shlex.join(command)}", flush=True)
    os.execve(command[0], command, os.environ | {DEV_MODE: "1", SPAWN: "spawn"})
