"""vLLM's start and end: what does not fit is told, errors reach everybody, and the process stays as it was."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_agentrl.engines import VLLMEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.lora import LoRA
from tests.engines.test_vllm_engine import MIXED, handle_of, policy_of, serve, trained_logps
from tests.moving import move

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_gb": 1e5}, r"lower data.init_args.engine.init_args.kv_cache_gb \(now 100000\)"),
        ({"kv_cache_gb": 0.0002}, r"raise data.init_args.engine.init_args.kv_cache_gb \(now 0.0002\)"),
    ],
)
def test_what_does_not_fit_the_memory_is_told_with_the_key(served_folder, settings, message):
    engine = VLLMEngine(**settings)
    with pytest.raises(ValueError, match=message):
        engine.start(handle_of(policy_of(served_folder)))
    engine.stop()
    assert not torch.distributed.is_initialized()


def own_engine(folder: Path, do: Callable[[VLLMEngine, LanguageModel], None], lora: LoRA | None = None) -> None:
    policy = policy_of(folder)
    if lora is not None:
        policy = LanguageModel(lora.adapt(policy.lm, "actor"))
    engine = VLLMEngine(kv_cache_gb=0.05)
    try:
        engine.start(handle_of(policy))
        do(engine, policy)
    finally:
        engine.stop()


def test_an_error_in_its_thread_reaches_all_who_wait_and_all_who_come(served_folder, monkeypatch):
    def broken(engine: VLLMEngine, policy: LanguageModel) -> None:
        engine.sync(0)
        steps: list[int] = []

        def step(vllm: Any) -> Any:
            steps.append(1)
            raise ZeroDivisionError("a bug\nof two lines")

        engine._thread.call(lambda vllm: monkeypatch.setattr(type(vllm), "step", step))

        async def everyone() -> list[Any]:
            return await asyncio.gather(*map(engine.generate, MIXED), return_exceptions=True)

        for _ in range(2):
            outcomes = {str(outcome) for outcome in asyncio.run(everyone())}
            assert outcomes == {"vLLM failed while sampling (ZeroDivisionError: a bug of two lines)"}
        with pytest.raises(RuntimeError, match="vLLM failed while sampling"):
            engine.sync(1)
        assert len(steps) == 1

    own_engine(served_folder, broken)


def test_logging_stays_as_it_was(served_folder, tmp_path):
    handler = logging.FileHandler(tmp_path / "own.log", mode="w")
    log = logging.getLogger("own")
    log.addHandler(handler)
    levels = {name: logging.getLogger(name).level for name in ("", "httpx", "own")}
    try:
        log.warning("before")
        own_engine(served_folder, lambda engine, policy: engine.sync(0))
        log.warning("after")  # a closed handler writes nothing more
    finally:
        log.removeHandler(handler)
    assert (tmp_path / "own.log").read_text() == "before\nafter\n"
    assert {name: logging.getLogger(name).level for name in levels} == levels
    assert logging.getLogRecordFactory() is logging.LogRecord


def test_the_process_stays_as_it_was(served_folder):
    """Random states, thread and precision settings and variables; and no thread or group of processes is left."""

    def first(engine: VLLMEngine, policy: LanguageModel) -> None:  # what imports and compilers of torch leave behind
        engine.sync(0)
        serve(engine, MIXED)

    own_engine(served_folder, first)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)

    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    torch.set_float32_matmul_precision("high")
    before, variables, set_num_threads = states(), dict(os.environ), torch.set_num_threads
    threads = {thread.name for thread in threading.enumerate()}

    def sample(engine: VLLMEngine, policy: LanguageModel) -> None:
        assert states() == before
        assert torch.set_num_threads is set_num_threads
        engine.sync(0)
        with engine.collecting():
            serve(engine, MIXED)
        assert states() == before

    own_engine(served_folder, sample)
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    changed = {name for name in os.environ | variables if os.environ.get(name) != variables.get(name)}
    assert [name for name in changed if not name.startswith("VLLM_")] == []
    assert "vllm-engine" not in {thread.name for thread in threading.enumerate()} - threads
    assert not torch.distributed.is_initialized()


def test_an_engine_can_be_started_again_and_then_needs_weights(served_folder):
    policy, engine = policy_of(served_folder), VLLMEngine(kv_cache_gb=0.05)
    replies = []
    for _ in range(2):
        engine.start(handle_of(policy))
        with pytest.raises(RuntimeError, match="no weights yet"):
            serve(engine, [MIXED[0]])
        engine.sync(0)
        replies.append(serve(engine, MIXED))
        engine.stop()
    assert [reply.ids for reply in replies[0]] == [reply.ids for reply in replies[1]]


def test_of_a_policy_with_adapters_only_these_are_sent(served_folder):
    def sample(engine: VLLMEngine, policy: LanguageModel) -> None:
        seen = []
        for version in range(3):
            engine.sync(version)
            replies = serve(engine, MIXED)
            for asked, reply in zip(MIXED, replies, strict=True):
                assert reply.logps == pytest.approx(trained_logps(policy, asked, reply), abs=2e-4)
            seen.append([reply.ids for reply in replies])
            move(policy, seed=version, share=0.1)
        assert seen[0] != seen[1] != seen[2]

    own_engine(served_folder, sample, LoRA(rank=4))
