"""Two real vLLM servers that are stopped or killed, whole or in part, in every stage of an iteration."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_agentrl.engines import VLLMServerEngine
from lightning_agentrl.engines.vllm_server.server import VLLMServer
from lightning_agentrl.rollout import PromptFormat, WindowMemory
from tests.agents.harness import make_agent, make_data, make_trainer
from tests.agents.test_asynchronous import Keep
from tests.engines.servers import Pair, ServerProcess, is_running, wait_until
from tests.rollout.scripted import story

pytestmark = pytest.mark.vllm

HANG_SECONDS = 6.0
SHORT = PromptFormat(think=False, instruction="", system="", examples=False, max_prompt_tokens=512)  # both are asked
STAGES = ("collect", "update", "transfer", "between")
PARTS: dict[str, Callable[[ServerProcess], int]] = {
    "api_server": lambda server: server.api_server,
    "core": lambda server: server.core,
}


class Faults(L.Callback):
    """A signal to each server in one stage, one after the other, in two iterations each; both are in use before.

    Args:
        stage: stage in which it comes; None: never.
        pair: the servers.
        part: process that gets the signal.
        signum: the signal.
    """

    def __init__(self, stage: str | None, pair: Pair, part: str, signum: signal.Signals) -> None:
        self.stage, self.pair, self.part, self.signum = stage, pair, part, signum
        self.due: ServerProcess | None = None  # gets the signal when its stage has come
        self.struck: list[ServerProcess] = []
        self.seconds: list[float] = []  # of two iterations each
        self._began, self._core = 0.0, 0

    def strike(self, server: ServerProcess, stage: str) -> None:
        """If that is due."""
        if server is not self.due or stage != self.stage:
            return
        self.struck.append(server)
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
            self._repair(self.struck[-1], trainer)
        assert self.due is None, f"no request to {self.due.url}"
        self._began = time.monotonic()
        if self.stage is not None and len(self.struck) < len(self.pair):
            self.due = self.pair[len(self.struck)]
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


def run(pair: Pair, folder: Path, path: Path, faults: Faults) -> list[Any]:
    """Train; return the story of each rollout."""
    keep = Keep()
    engine = VLLMServerEngine([server.url for server in pair], hang_seconds=HANG_SECONDS)
    trainer = make_trainer(path, 1 + 2 * len(pair), [keep, faults], precision="32-true")
    data = make_data(engine=engine, num_envs=8, turns_per_env=2, prompt=SHORT, memory=WindowMemory(0))
    try:
        trainer.fit(make_agent(folder), data)
    finally:
        engine.stop()
    return [story(rollout) for rollout in keep.rollouts]


Undisturbed = tuple[list[Any], float]
BEFORE: list[Undisturbed] = []  # one for all tests


def undisturbed(pair: Pair, folder: Path, path: Path) -> Undisturbed:
    """The stories of a run in which nothing happens, and the seconds of two iterations."""
    if not BEFORE:
        calm = Faults(None, pair, "core", signal.SIGSTOP)
        stories = run(pair, folder, path, calm)
        BEFORE.append((stories, statistics.mean(calm.seconds)))
    return BEFORE[0]


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL], ids=lambda signum: signum.name)
def test_no_turn_is_lost_or_doubled_and_nobody_waits_long(
    signum: signal.Signals,
    part: str,
    stage: str,
    pair: Pair,
    served_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each server in turn; the turns are those of a run in which nothing happens."""
    stories, usual = undisturbed(pair, served_folder, tmp_path)
    faults = Faults(stage, pair, part, signum)
    strike_within(faults, monkeypatch)
    try:
        with pytest.warns(UserWarning, match="is not used"):
            disturbed = run(pair, served_folder, tmp_path, faults)
    finally:
        for server in pair:
            mend(server)
    waits = [seconds - usual for seconds in faults.seconds]
    with capsys.disabled():
        listed = " and ".join(f"{waited:.1f}" for waited in waits)
        print(f"\n{signum.name} {part} {stage}: {listed} s more than {usual:.1f} s, patience {HANG_SECONDS:g} s")
    assert faults.struck == list(pair)
    assert disturbed == stories
    assert max(waits) <= 2 * HANG_SECONDS


def test_a_core_ends_with_its_api_server_even_when_it_is_stopped(pair: Pair) -> None:
    for server, stopped in zip(pair, (False, True), strict=True):
        core = server.core
        if stopped:
            os.kill(core, signal.SIGSTOP)
        os.kill(server.api_server, signal.SIGKILL)
        wait_until(lambda core=core: not is_running(core), 10)
        server.kill()


def mend(server: ServerProcess) -> None:
    """Leave a server that runs, or none."""
    if server.process is None or server.process.poll() is not None:
        server.kill()
    else:
        for part in PARTS.values():
            os.kill(part(server), signal.SIGCONT)


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

    async def call(self: VLLMServer, method: str, **arguments: Any) -> Any:
        return await striking(call_workers(self, method, **arguments), self.url, "transfer")

    monkeypatch.setattr(VLLMServer, "generate", sample)
    monkeypatch.setattr(VLLMServer, "call_workers", call)
