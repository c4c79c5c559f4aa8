"""Two real vLLM servers that are stopped or killed, whole or in part, in every stage of an iteration."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_agentrl.engines import VLLMServerEngine
from lightning_agentrl.engines.vllm_server.server import VLLMServer
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.test_asynchronous import Keep
from tests.engines.servers import Pair, ServerProcess, is_running
from tests.engines.test_vllm_engine import pytestmark  # noqa: F401
from tests.rollout.scripted import story

HANG_SECONDS = 6.0
STAGES = ("collect", "update", "transfer", "between")
PARTS: dict[str, Callable[[ServerProcess], int]] = {
    "api_server": lambda server: server.api_server,
    "core": lambda server: server.core,
}


def wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_core_ends_with_its_api_server_even_when_it_is_stopped(pair: Pair) -> None:
    for server, stopped in zip(pair, (False, True), strict=True):
        core = server.core
        if stopped:
            os.kill(core, signal.SIGSTOP)
        os.kill(server.api_server, signal.SIGKILL)
        wait_until(lambda core=core: not is_running(core), 10)
        server.kill()


@dataclass(frozen=True)
class Fault:
    """A signal to one process of one server in one stage."""

    server: int
    stage: str


class Faults(L.Callback):
    """One fault after the other, each in two iterations, with both servers in use at its beginning.

    Args:
        faults: the faults.
        pair: the servers.
        part: process that gets the signal.
        signum: the signal.
    """

    def __init__(self, faults: list[Fault], pair: Pair, part: str, signum: signal.Signals) -> None:
        self.faults, self.pair, self.part, self.signum = faults, pair, part, signum
        self.due: Fault | None = None  # waits for its stage
        self.struck: list[Fault] = []
        self.seconds: list[float] = []  # of two iterations each
        self._began, self._core = 0.0, 0

    def strike(self, server: ServerProcess, stage: str) -> None:
        """If that is due."""
        if self.due is None or (self.pair[self.due.server], self.due.stage) != (server, stage):
            return
        self.struck.append(self.due)
        self.due, self._core = None, server.core
        os.kill(PARTS[self.part](server), self.signum)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for server in self.pair:
            self.strike(server, "update")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch % 2:
            return
        if trainer.current_epoch > 0:
            self.seconds.append(time.monotonic() - self._began)
        if self.struck:
            self._repair(self.pair[self.struck[-1].server], trainer)
        assert self.due is None, f"{self.due} has never come"
        self._began = time.monotonic()
        if len(self.struck) < len(self.faults):
            self.due = self.faults[len(self.struck)]
            for server in self.pair:
                self.strike(server, "between")

    def _repair(self, server: ServerProcess, trainer: L.Trainer) -> None:
        if self.signum == signal.SIGSTOP:
            os.kill(PARTS[self.part](server), signal.SIGCONT)
        else:
            assert server.process is not None
            server.process.wait(60)
            wait_until(lambda: not is_running(self._core), 10)
            server.kill()
            server.start()
            server.wait()
        pool = trainer.datamodule.engine._pool  # type: ignore[attr-defined]
        wait_until(lambda: all(replica.used for replica in pool.replicas))


def run(pair: Pair, folder: Path, path: Path, epochs: int, *callbacks: L.Callback) -> list[Any]:
    """Train; return the story of each rollout."""
    keep = Keep()
    engine = VLLMServerEngine([server.url for server in pair], hang_seconds=HANG_SECONDS)
    trainer = make_trainer(path, epochs, [keep, *callbacks], precision="32-true")
    trainer.fit(make_agent(folder), make_data(engine=engine))
    return [story(rollout) for rollout in keep.rollouts]


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL], ids=lambda signum: signum.name)
def test_no_turn_is_lost_or_doubled_and_nobody_waits_long(
    signum: signal.Signals,
    part: str,
    pair: Pair,
    served_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each server in each stage of one run, whose turns are those of a run in which nothing happens."""
    faults = [Fault(server, stage) for stage, server in itertools.product(STAGES, (0, 1))]
    epochs = 2 * len(faults) + 1
    calm = Faults([], pair, part, signum)
    undisturbed = run(pair, served_folder, tmp_path, epochs, calm)
    usual = statistics.median(calm.seconds)

    disturbing = Faults(faults, pair, part, signum)
    strike_within(disturbing, monkeypatch)
    with pytest.warns(UserWarning, match="is not used"):
        rollouts = run(pair, served_folder, tmp_path, epochs, disturbing)

    waits = [seconds - usual for seconds in disturbing.seconds]
    with capsys.disabled():
        print(f"\n{signum.name} {part}, two iterations take {usual:.1f} s; seconds more, deadline {HANG_SECONDS:g} s:")
        for fault, waited in zip(disturbing.struck, waits, strict=True):
            print(f"  {fault.stage:9} server {fault.server}: {waited:5.1f}")
    assert disturbing.struck == faults
    assert len(rollouts) == epochs
    assert rollouts == undisturbed
    assert max(waits) <= 2 * HANG_SECONDS


def strike_within(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server samples, and while it takes weights."""
    generate, call_workers = VLLMServer.generate, VLLMServer.call_workers
    by_url = {server.url: server for server in faults.pair}

    async def striking(work: Any, url: str, stage: str) -> Any:
        working = asyncio.ensure_future(work)
        await asyncio.sleep(0.01)
        faults.strike(by_url[url], stage)
        return await working

    async def sample(self: VLLMServer, *args: Any) -> Any:
        return await striking(generate(self, *args), self.url, "collect")

    async def call(self: VLLMServer, method: str, **arguments: Any) -> None:
        await striking(call_workers(self, method, **arguments), self.url, "transfer")

    monkeypatch.setattr(VLLMServer, "generate", sample)
    monkeypatch.setattr(VLLMServer, "call_workers", call)
