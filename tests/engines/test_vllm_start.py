"""vLLM's start and end: what does not fit is told, errors reach everybody, and the process stays as it was."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_agentrl.engines import Reply, VLLMEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.lora import LoRA
from tests.engines.test_vllm_engine import MIXED, handle_of, policy_of, serve, trained_logps
from tests.moving import move

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_gb": 1e5}, r"change data.init_args.engine.init_args.kv_cache_gb \(now 100000\)"),
        ({"kv_cache_gb": 0.0002}, r"change data.init_args.engine.init_args.kv_cache_gb \(now 0.0002\)"),
    ],
)
def test_what_does_not_fit_the_memory_is_told_with_the_key(served_folder, settings, message):
    engine = VLLMEngine(**settings)
    with pytest.raises(ValueError, match=message):
        engine.start(handle_of(policy_of(served_folder)))
    engine.stop()
    assert not torch.distributed.is_initialized()


@dataclass
class Starts:
    """What was seen of an engine that broke and was started again."""

    replies: list[list[Reply]] = field(default_factory=list)  # of each start
    without_weights: list[str] = field(default_factory=list)  # what it says then, of each start
    broken: list[str] = field(default_factory=list)  # what everybody is told once its thread has failed
    steps: int = 0  # after the fault
    states: list[tuple[Any, ...]] = field(default_factory=list)  # before the second start, with the engine, and later
    changed: list[str] = field(default_factory=list)  # variables
    threads: set[str] = field(default_factory=set)  # that are left
    logged: str = ""


def states() -> tuple[Any, ...]:
    """What vLLM would change; random states, and settings of torch."""
    seen = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    return *seen, torch.set_num_threads, torch.get_float32_matmul_precision()


def levels() -> dict[str, int]:
    return {name: logging.getLogger(name).level for name in ("", "httpx", "own")}


def break_off(engine: VLLMEngine, seen: Starts) -> None:
    """With an error in the engine's thread, while replies are sampled."""

    def step(vllm: Any) -> Any:
        seen.steps += 1
        raise ZeroDivisionError("a bug\nof two lines")

    async def everyone() -> list[Any]:
        return await asyncio.gather(*map(engine.generate, MIXED), return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        engine._thread.call(lambda vllm: patch.setattr(type(vllm), "step", step))
        for _ in range(2):
            seen.broken += [str(outcome) for outcome in asyncio.run(everyone())]
        with pytest.raises(RuntimeError, match="vLLM failed while sampling"):
            engine.sync(1)


@pytest.fixture(scope="module")
def starts(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """Of two starts of one engine: the first ends with an error, and imports all; the second leaves no trace."""
    seen, policy, engine = Starts(), policy_of(served_folder), VLLMEngine(kv_cache_gb=0.05)

    def sample() -> None:
        engine.start(handle_of(policy))
        with pytest.raises(RuntimeError) as error:
            serve(engine, [MIXED[0]])
        seen.without_weights.append(str(error.value))
        engine.sync(0)
        with engine.collecting():
            seen.replies.append(serve(engine, MIXED))

    handler = logging.FileHandler(tmp_path_factory.mktemp("log") / "own.log", mode="w")
    log = logging.getLogger("own")
    log.addHandler(handler)
    before = levels()
    torch.set_float32_matmul_precision("high")  # for both, since torch compiles anew for another one
    try:
        log.warning("before")
        sample()
        break_off(engine, seen)
        engine.stop()
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        variables, threads = dict(os.environ), {thread.name for thread in threading.enumerate()}
        seen.states.append(states())
        sample()
        seen.states.append(states())
        engine.stop()
        seen.states.append(states())
        seen.changed = [name for name in os.environ | variables if os.environ.get(name) != variables.get(name)]
        seen.threads = {thread.name for thread in threading.enumerate()} - threads
        log.warning("after")  # a closed handler writes nothing more
    finally:
        engine.stop()
        torch.set_float32_matmul_precision("highest")
        log.removeHandler(handler)
    assert levels() == before
    seen.logged = Path(handler.baseFilename).read_text()
    return seen


def test_an_error_in_its_thread_reaches_all_who_wait_and_all_who_come(starts):
    assert len(starts.broken) == 2 * len(MIXED)
    assert set(starts.broken) == {"vLLM failed while sampling (ZeroDivisionError: a bug of two lines)"}
    assert starts.steps == 1


def test_logging_stays_as_it_was(starts):
    """The levels are looked at in the fixture."""
    assert starts.logged == "before\nafter\n"
    assert logging.getLogRecordFactory() is logging.LogRecord


def test_the_process_stays_as_it_was(starts):
    """Random states, thread and precision settings and variables; and no thread or group of processes is left."""
    before, meanwhile, after = starts.states
    assert before == meanwhile == after
    assert after[-1] == "high"
    assert [name for name in starts.changed if not name.startswith("VLLM_")] == []
    assert "vllm-engine" not in starts.threads
    assert not torch.distributed.is_initialized()


def test_an_engine_can_be_started_again_after_an_error_and_then_needs_weights(starts):
    assert len(starts.without_weights) == 2
    assert all("no weights yet" in said for said in starts.without_weights)
    first, second = starts.replies
    assert [reply.ids for reply in first] == [reply.ids for reply in second]


def test_of_a_policy_with_adapters_only_these_are_sent(served_folder):
    policy = LanguageModel(LoRA(rank=4).adapt(policy_of(served_folder).lm, "actor"))
    engine, seen = VLLMEngine(kv_cache_gb=0.05), []
    try:
        engine.start(handle_of(policy))
        for version in range(3):
            engine.sync(version)
            replies = serve(engine, MIXED)
            for asked, reply in zip(MIXED, replies, strict=True):
                assert reply.logps == pytest.approx(trained_logps(policy, asked, reply), abs=2e-4)
            seen.append([reply.ids for reply in replies])
            move(policy, seed=version, share=0.1)
    finally:
        engine.stop()
    assert seen[0] != seen[1] != seen[2]
