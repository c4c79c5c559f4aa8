"""Two real vLLM servers: they sample from the policy as it is now, and what does not fit is refused."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.engines import PolicyHandle, VLLMServerEngine
from lightning_agentrl.engines import weights as engine_weights
from lightning_agentrl.engines.vllm_server import server as vllm_server
from lightning_agentrl.engines.vllm_server.server import VLLMServer
from lightning_agentrl.engines.vllm_server.shared_weights import SharedWeights
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.lora import LoRA
from tests.cli import Config, Verify, changed
from tests.engines.servers import Pair, places, standing_still, watched
from tests.engines.test_vllm_engine import (
    CLOSE,
    MIXED,
    PREFIX,
    handle_of,
    policy_of,
    request,
    serve,
    trained_logps,
)
from tests.engines.withheld import check_each_kind
from tests.inputs import random_ids
from tests.moving import move

pytestmark = pytest.mark.vllm


@pytest.fixture
def policy(served_folder: Path) -> LanguageModel:
    return policy_of(served_folder)


@pytest.fixture
def engine(pair: Pair, policy: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMServerEngine]:
    with watched(VLLMServerEngine([server.url for server in pair]), handle_of(policy), monkeypatch) as engine:
        yield engine


def wait_until_all_are_used(engine: VLLMServerEngine) -> None:
    """One that was dropped comes back on its own, beside what is sampled meanwhile."""
    assert engine._pool is not None
    end = time.monotonic() + 30
    while not all(replica.used for replica in engine._pool.replicas):
        assert time.monotonic() < end
        time.sleep(0.1)


# What is sampled


def test_logps_are_the_trainers_before_and_after_updates(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both servers, of mixed temperatures, with prefix caches that were filled under the old weights."""
    asked, seen = places(monkeypatch), []
    for version in range(3):
        engine.sync(version)
        replies = serve(engine, MIXED)
        for one, reply in zip(MIXED, replies, strict=True):
            assert reply.logps == pytest.approx(trained_logps(policy, one, reply), abs=2e-4)
            assert reply.policy_version == version
            assert reply.closed == (reply.ids[-1] == CLOSE)
            assert reply.closed or len(reply.ids) == one.max_tokens
        seen.append([reply.ids for reply in replies])
        move(policy, seed=version, share=0.1)
    assert seen[0] != seen[1] != seen[2]
    assert set(asked) == {server.url for server in pair}


def test_replies_follow_from_their_seeds_whichever_server_samples_them(engine: VLLMServerEngine) -> None:
    together = [reply.ids for reply in serve(engine, MIXED)]
    engine.sync(1)
    alone = [serve(engine, [one])[0].ids for one in MIXED]
    assert together == alone


def test_a_growing_episode_stays_on_its_server(engine: VLLMServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = places(monkeypatch)

    async def episode(number: int) -> list[str]:
        prompt, where = PREFIX + random_ids(number, 200), []
        for turn in range(4):
            before = len(asked)
            asked_for = replace(request(prompt, seed=turn, max_tokens=4), number=(number, turn))
            reply = asyncio.create_task(engine.generate(asked_for))
            while len(asked) == before:
                await asyncio.sleep(0.001)
            where.append(asked[before])
            prompt += (await reply).ids + random_ids(turn, 30)
        return where

    async def one_after_the_other() -> list[list[str]]:
        return [await episode(number) for number in range(3)]

    for where in asyncio.run(one_after_the_other()):
        assert len(set(where)) == 1


def test_adapters_are_sampled_with(pair: Pair, served_folder: Path) -> None:
    policy = LanguageModel(LoRA(rank=4).adapt(policy_of(served_folder).lm, "actor"))
    engine = VLLMServerEngine([server.url for server in pair])
    try:
        engine.start(handle_of(policy))
        for version in range(2):
            move(policy, seed=version, share=0.1)
            engine.sync(version)
            for one, reply in zip(MIXED, serve(engine, MIXED), strict=True):
                assert reply.logps == pytest.approx(trained_logps(policy, one, reply), abs=2e-4)
    finally:
        engine.stop()


# Weights that an update leaves out


@pytest.fixture
def given(server_config: Config) -> Config:
    return changed(server_config, "data.init_args.interaction.init_args.max_reply_tokens", 24)


def test_each_kind_of_weight_that_is_withheld_is_found_out(
    verify: Verify,
    given: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_each_kind(verify, given, engine_weights, monkeypatch, capsys)


# What is refused


def test_a_server_with_another_model_is_refused(pair: Pair, tiny_folder: Path) -> None:
    engine = VLLMServerEngine([pair[0].url])
    with pytest.raises(ValueError, match=r"'.*served'.*head_dim.*32.*8"):
        engine.start(handle_of(policy_of(tiny_folder)))
    engine.stop()


def test_a_server_for_shorter_prompts_is_refused(pair: Pair, served_folder: Path) -> None:
    policy = policy_of(served_folder)
    policy.lm.config.max_position_embeddings = 4096
    engine = VLLMServerEngine([pair[0].url])
    with pytest.raises(ValueError, match=r"2048.*3000.*--max-model-len.*3000"):
        engine.start(PolicyHandle(policy, (CLOSE,), nullcontext, max_model_len=3000))
    engine.stop()


def test_a_server_that_was_not_started_by_our_command_is_refused(
    pair: Pair, served_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the worker extension."""
    monkeypatch.setattr(vllm_server, "POLICY_SIZES", "no_such_method")
    engine = VLLMServerEngine([pair[0].url])
    with pytest.raises(ValueError, match=r"`agentrl serve`"):
        engine.start(handle_of(policy_of(served_folder)))
    engine.stop()


def test_requests_that_would_be_changed_or_end_a_server_are_refused(engine: VLLMServerEngine) -> None:
    for asked, message in (
        (request(random_ids(1, 400), max_tokens=1), r"prompt of 400 tokens and a reply of up to 1 .*max_prompt_tokens"),
        (request(random_ids(1, 3), temperature=2.5), "temperature 0, or 0.01 to 2, got 2.5"),
    ):
        with pytest.raises(ValueError, match=message):
            serve(engine, [asked])
    assert serve(engine, [MIXED[0]])


def test_weights_that_a_server_does_not_see_are_told_and_others_are_taken_afterwards(
    pair: Pair, policy: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the folder is not shared."""
    engine = VLLMServerEngine([pair[1].url])
    write = SharedWeights.write
    try:
        engine.start(handle_of(policy))
        monkeypatch.setattr(SharedWeights, "write", lambda *args: write(*args) / "elsewhere")
        with pytest.raises(ValueError, match=r"weights_folder"):
            engine.sync(0)
        monkeypatch.undo()
        engine.sync(1)
        (reply,) = serve(engine, MIXED[:1])
        assert reply.logps == pytest.approx(trained_logps(policy, MIXED[0], reply), abs=2e-4)
    finally:
        engine.stop()


def test_weights_of_another_run_are_found_in_the_reply(engine: VLLMServerEngine, pair: Pair) -> None:
    for server in pair:
        server.post("/update_weight_version", {"new_version": "other-1"})
    with pytest.raises(ValueError, match=r"version other-1, and not \w+-1; another run .*urls"):
        serve(engine, [MIXED[0]])
    engine.sync(1)
    assert serve(engine, [MIXED[0]])[0].policy_version == 1


def test_an_engine_that_was_not_started_or_has_no_weights_says_so(pair: Pair, policy: LanguageModel) -> None:
    engine = VLLMServerEngine([pair[0].url])
    with pytest.raises(RuntimeError, match="not started"):
        serve(engine, [MIXED[0]])
    with pytest.raises(RuntimeError, match="not started"):
        engine.sync(0)
    engine.stop()
    engine.start(handle_of(policy))
    try:
        with pytest.raises(RuntimeError, match="no weights yet"):
            serve(engine, [MIXED[0]])
    finally:
        engine.stop()


# Servers that come and go


def test_a_cancelled_request_is_taken_back(engine: VLLMServerEngine, pair: Pair) -> None:
    async def cancel_one() -> None:
        late = asyncio.create_task(engine.generate(request(random_ids(5, 3), max_tokens=390)))
        await asyncio.sleep(0.05)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late

    with standing_still(pair):
        asyncio.run(cancel_one())
    engine.sync(5)  # impossible while something is sampled
    assert serve(engine, [MIXED[0]])[0].policy_version == 5


def test_those_who_wait_are_told_when_the_engine_is_stopped(engine: VLLMServerEngine, pair: Pair) -> None:
    async def stop() -> Any:
        waiting = asyncio.create_task(engine.generate(request(random_ids(5, 3), max_tokens=390)))
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, engine.stop)
        return await asyncio.gather(waiting, return_exceptions=True)

    with standing_still(pair):
        (outcome,) = asyncio.run(stop())
    assert str(outcome) == "the engine was stopped"


def test_a_server_that_was_started_again_gets_the_weights_before_it_is_used(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, served_folder: Path
) -> None:
    """It has those of its start, and the version of a start."""
    move(policy, seed=1, share=0.1)
    engine.sync(1)
    first, _ = pair
    first.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(served_folder)}})
    first.post("/update_weight_version", {"new_version": "default"})
    with pytest.warns(UserWarning, match=f"{first.url}.*1.*2"):
        replies = serve(engine, MIXED)
    wait_until_all_are_used(engine)
    replies += serve(engine, MIXED)
    for asked, reply in zip(MIXED * 2, replies, strict=True):
        assert reply.logps == pytest.approx(trained_logps(policy, asked, reply), abs=2e-4)


def test_a_server_that_takes_other_bits_is_not_used(
    engine: VLLMServerEngine, policy: LanguageModel, pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second one reads a folder in which one tensor is another."""
    load, other = VLLMServer.load, copy.deepcopy(policy.lm)
    with torch.no_grad():
        other.model.layers[0].input_layernorm.weight[0].neg_()  # linear layers are packed on a CPU
    wrong = SharedWeights(str(tmp_path)).write(other, "wrong")

    async def astray(self: VLLMServer, folder: Path, *args: Any) -> None:
        await load(self, wrong if self.url == pair[1].url else folder, *args)

    engine.sync(1)
    with monkeypatch.context() as patch:
        patch.setattr(VLLMServer, "load", astray)
        with pytest.warns(UserWarning, match="after the same update"):
            engine.sync(2)
        asked = places(monkeypatch)
        serve(engine, MIXED[:4])
        assert len(set(asked)) == 1
    engine.sync(3)
    wait_until_all_are_used(engine)
    serve(engine, MIXED)
    assert set(asked) == {server.url for server in pair}
