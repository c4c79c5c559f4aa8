"""Real vLLM servers for tests, as `agentrl serve` starts them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_agentrl.engines import PolicyHandle, VLLMServerEngine
from lightning_agentrl.engines.vllm_server import pool as server_pool
from lightning_agentrl.engines.vllm_server.server import VLLMServer

ROOT = Path(__file__).parents[2]
SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", str(100 * 2**20), "--max-num-seqs", "64")


class ServerProcess:
    """A server on a port of its own, with all its processes in a group that can be ended at once.

    Args:
        model: folder of the model.
        log: file that it writes to.
        options: of vLLM.
        workers: whether what computes has a process of its own, as vLLM has it on a CPU; without, as on one GPU, it is
            in the core, and a server starts in three quarters of the time.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        options: Sequence[str] = SMALL,
        workers: bool = True,
    ) -> None:
        self.model, self.log, self.options, self.workers = model, log, options, workers
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to start; see :meth:`wait`."""
        command = [sys.executable, "-m", "lightning_agentrl", "serve", str(self.model), "--port", str(self.port)]
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if not self.workers:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--", *self.options],
                env=os.environ | variables | {"VLLM_LOGGING_LEVEL": "WARNING"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, seconds: float = 300) -> None:
        """Until it answers."""
        end = time.monotonic() + seconds
        while not self.answers():
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def post(self, path: str, body: Any) -> None:
        """As somebody else than the engine would."""
        data, head = json.dumps(body).encode(), {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(self.url + path, data, head), timeout=60).close()

    @property
    def api_server(self) -> int:
        """Process that answers requests."""
        assert self.process is not None
        return self.process.pid

    @property
    def core(self) -> int:
        """Process of its engine."""
        (core,) = [pid for pid in _children(self.api_server) if b"resource_tracker" not in _read(pid, "cmdline")]
        return core

    def kill(self) -> None:
        """All of its processes at once, as when a machine fails."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def is_running(pid: int) -> bool:
    """Whether a process is there, and has not only to be reaped."""
    return bool(stat := _read(pid, "stat")) and _after_name(stat)[0] != b"Z"


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def _children(parent: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if is_running(pid) and int(_after_name(_read(pid, "stat"))[1]) == parent]


def _after_name(stat: bytes) -> list[bytes]:
    return stat.rpartition(b")")[2].split() or [b"Z", b"0"]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


Pair = tuple[ServerProcess, ServerProcess]


@contextmanager
def watched(
    engine: VLLMServerEngine, handle: PolicyHandle, monkeypatch: pytest.MonkeyPatch
) -> Iterator[VLLMServerEngine]:
    """With the first weights; servers are looked at so often that this also happens while they take weights."""
    monkeypatch.setattr(server_pool, "LOOK_SECONDS", 0.01)
    try:
        engine.start(handle)
        engine.sync(0)
        yield engine
    finally:
        engine.stop()


@contextmanager
def standing_still(servers: Sequence[ServerProcess]) -> Iterator[None]:
    """Servers that take requests and finish none, however long the test itself is kept waiting."""
    cores = [server.core for server in servers]
    for core in cores:
        os.kill(core, signal.SIGSTOP)
    try:
        yield
    finally:
        for core in cores:
            os.kill(core, signal.SIGCONT)


def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Address of the server of each request, as they come."""
    asked: list[str] = []
    generate = VLLMServer.generate

    async def noted(self: VLLMServer, *args: Any) -> Any:
        asked.append(self.url)
        return await generate(self, *args)

    monkeypatch.setattr(VLLMServer, "generate", noted)
    return asked


def kill_while_it_samples(
    monkeypatch: pytest.MonkeyPatch, server: ServerProcess, reply: int, then: Callable[[], None] = lambda: None
) -> list[int]:
    """While it samples so many of its replies; gives how many it was asked for."""
    asked, generate = [0], VLLMServer.generate

    async def killing(self: VLLMServer, *args: Any) -> Any:
        if self.url != server.url:
            return await generate(self, *args)
        asked[0] += 1
        if asked[0] != reply:
            return await generate(self, *args)
        sampling = asyncio.create_task(generate(self, *args))
        await asyncio.sleep(0.02)
        server.kill()
        then()
        return await sampling

    monkeypatch.setattr(VLLMServer, "generate", killing)
    return asked
