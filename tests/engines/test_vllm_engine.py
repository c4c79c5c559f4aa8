"""vLLM in process: it samples from the policy as it is now, says with what probability, and keeps nobody waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_agentrl.engines import PolicyHandle, Reply, SamplingRequest, VLLMEngine
from lightning_agentrl.engines.vllm.thread import Handling, VLLMThread
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from tests.inputs import random_ids, text
from tests.moving import move
from tests.tiny import VOCABULARY

pytestmark = pytest.mark.vllm
CLOSE = 7  # not the end-of-sequence id of the folder, which is 2
LONGEST = 400


def request(prompt: tuple[int, ...], seed: int = 0, max_tokens: int = 12, temperature: float = 1.0) -> SamplingRequest:
    return SamplingRequest(text(*prompt), max_tokens, temperature, seed)


PREFIX = random_ids(0, 70)  # more than two blocks of the prefix cache
MIXED = [
    request(PREFIX + random_ids(1, 4), seed=1),
    request(PREFIX + random_ids(2, 1), seed=2, max_tokens=3),
    request(PREFIX, seed=3),
    request(PREFIX, seed=4, temperature=0.5),
    request(random_ids(3, 2), seed=5, temperature=1.5),
    request(random_ids(4, 1), seed=6, max_tokens=30),
    request(PREFIX + random_ids(1, 4), seed=7, temperature=0.0),
]


def policy_of(folder: Path) -> LanguageModel:
    return LanguageModel(load_causal_lm(str(folder))).train()


def handle_of(policy: LanguageModel) -> PolicyHandle:
    return PolicyHandle(policy, (CLOSE,), nullcontext, max_model_len=LONGEST)


@pytest.fixture(scope="module")
def policy(served_folder: Path) -> LanguageModel:
    return policy_of(served_folder)


@pytest.fixture(scope="module")
def started(policy: LanguageModel) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(kv_cache_gb=0.05)
    engine.start(handle_of(policy))
    yield engine
    engine.stop()


@pytest.fixture
def engine(started: VLLMEngine) -> VLLMEngine:
    started.sync(0)
    return started


def serve(engine: VLLMEngine, requests: Sequence[SamplingRequest]) -> list[Reply]:
    async def together() -> list[Reply]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), timeout=120)

    return asyncio.run(together())


@torch.no_grad()
def trained_logps(policy: LanguageModel, asked: SamplingRequest, reply: Reply) -> list[float]:
    ids = torch.tensor([[*asked.prompt.ids, *reply.ids]])
    log_pi = (policy.lm(ids, use_cache=False).logits[0] / (asked.temperature or 1.0)).log_softmax(-1)
    start = len(asked.prompt) - 1
    return [float(log_pi[start + k, token]) for k, token in enumerate(reply.ids)]


# What is sampled


def test_logps_are_the_trainers_before_and_after_updates(engine, policy):
    """Of mixed temperatures, with the prefix cache filled under the old weights."""
    seen = []
    for version in range(3):
        engine.sync(version)
        replies = serve(engine, MIXED)
        for asked, reply in zip(MIXED, replies, strict=True):
            assert reply.logps == pytest.approx(trained_logps(policy, asked, reply), abs=2e-4)
            assert reply.policy_version == version
        seen.append([reply.ids for reply in replies])
        move(policy, seed=version, share=0.1)
    assert seen[0] != seen[1] != seen[2]


def test_replies_end_at_a_close_id_or_the_cap_and_nowhere_else(engine):
    """The end-of-sequence id of the model's folder is a token like any other."""
    replies = serve(engine, [request(PREFIX, seed=k, max_tokens=40, temperature=2.0) for k in range(60)])
    assert {reply.closed for reply in replies} == {True, False}
    for reply in replies:
        assert reply.closed == (reply.ids[-1] == CLOSE)
        assert reply.closed or len(reply.ids) == 40
        assert CLOSE not in reply.ids[:-1]
        assert len(reply.logps) == len(reply.ids)
    assert any(2 in reply.ids[:-1] for reply in replies)


def test_the_whole_distribution_is_sampled(engine, policy):
    """No top-p, top-k, min-p or penalty: first tokens come as often as the policy says, rare ones too."""
    prompt, count = random_ids(9, 5), 3000
    replies = serve(engine, [request(prompt, seed=k, max_tokens=1) for k in range(count)])
    with torch.no_grad():
        pi = policy.lm(torch.tensor([list(prompt)])).logits[0, -1].softmax(-1).double()
    counted = torch.zeros(VOCABULARY, dtype=torch.float64)
    for token, times in Counter(reply.ids[0] for reply in replies).items():
        counted[token] = times
    expected = pi * count
    often = expected >= 5
    assert int(often.sum()) > 20
    both = torch.stack([torch.cat([x[often], x[~often].sum()[None]]) for x in (counted, expected)])
    chi2 = float(((both[0] - both[1]).square() / both[1]).sum())
    freedom = both.shape[1] - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5
    rare = pi < pi.quantile(0.5)
    assert float(counted[rare].sum()) == pytest.approx(float(expected[rare].sum()), rel=0.35)


def test_replies_follow_from_their_seeds_whoever_else_is_served(engine):
    together = [reply.ids for reply in serve(engine, MIXED)]
    engine.sync(1)  # without the prefix cache of before
    alone = [serve(engine, [one])[0].ids for one in MIXED]
    again = [reply.ids for reply in serve(engine, list(reversed(MIXED)))][::-1]
    assert together == alone == again
    others = serve(engine, [request(PREFIX, seed=100 + k) for k in range(8)])
    assert len({reply.ids for reply in others}) == 8


def test_more_tokens_than_one_step_reads(engine, policy):
    """4200 at once, of which vLLM reads 2048 in a step."""
    asked = [request(random_ids(k, 350), seed=k, max_tokens=4) for k in range(12)]
    for one, reply in zip(asked, serve(engine, asked), strict=True):
        assert reply.logps == pytest.approx(trained_logps(policy, one, reply), abs=2e-4)


# Nobody waits for anybody


def test_a_short_reply_does_not_wait_for_a_long_one(engine):
    """Ten turns of one environment are over before the one long reply of another."""
    order: list[str] = []

    async def long() -> None:
        await engine.generate(request(random_ids(5, 3), seed=1, max_tokens=300))
        order.append("long")

    async def short() -> None:
        for turn in range(10):
            await engine.generate(request(random_ids(6, 3), seed=turn, max_tokens=2))
            order.append("short")

    async def together() -> None:
        await asyncio.gather(long(), short())

    asyncio.run(together())
    assert order == ["short"] * 10 + ["long"]


def test_a_cancelled_request_is_taken_back(engine):
    async def cancel_one() -> Reply:
        late = asyncio.create_task(engine.generate(request(random_ids(5, 3), max_tokens=390)))
        await engine.generate(request(random_ids(6, 3), max_tokens=1))  # the late one is in flight
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        return await engine.generate(request(random_ids(6, 3), max_tokens=1))

    asyncio.run(cancel_one())
    assert engine._thread._in_flight == {}
    engine.sync(5)  # refused while something is sampled
    assert serve(engine, [MIXED[0]])[0].policy_version == 5


def test_weights_do_not_change_while_replies_are_sampled(engine):
    async def too_early() -> None:
        running = asyncio.create_task(engine.generate(request(random_ids(5, 3), max_tokens=300)))
        await engine.generate(request(random_ids(6, 3), max_tokens=1))
        with pytest.raises(RuntimeError, match="replies are still being sampled"):
            engine.sync(1)
        await running

    asyncio.run(too_early())


# What is refused


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            request(random_ids(1, LONGEST), max_tokens=1),
            r"prompt of 400 tokens and a reply of up to 1 .*max_prompt_tokens",
        ),
        (
            request(random_ids(1, 3), temperature=0.001),
            r"temperature 0, or 0.01 to 2, got 0.001.*init_args.temperature",
        ),
        (request(random_ids(1, 3), temperature=2.5), r"got 2.5"),
    ],
)
def test_requests_that_vllm_would_change_are_refused(engine, asked, message):
    with pytest.raises(ValueError, match=message):
        serve(engine, [asked])
    assert serve(engine, [MIXED[0]])


def test_an_engine_that_was_not_started_or_has_no_weights_says_so(served_folder):
    with pytest.raises(RuntimeError, match="not started"):
        serve(VLLMEngine(), [MIXED[0]])
    with pytest.raises(RuntimeError, match="not started"):
        VLLMEngine().sync(0)
    VLLMEngine().stop()


@pytest.mark.parametrize("spoil", ["ids", "logprobs", "finish_reason"])
def test_an_answer_that_is_not_whole_is_never_a_reply(engine, monkeypatch, spoil):
    def without(output: Any) -> Any:
        sampled = output.outputs[0]
        if spoil == "ids":
            sampled.token_ids = []
        elif spoil == "logprobs":
            sampled.logprobs = sampled.logprobs[:-1]
        else:
            sampled.finish_reason = "abort"
        return output

    finished: list[Any] = []
    handling = engine._thread._handling
    read = handling.read
    keeping = replace(handling, read=lambda output: finished.append(output) or read(output))
    monkeypatch.setattr(engine._thread, "_handling", keeping)
    serve(engine, [MIXED[0]])
    with pytest.raises(RuntimeError, match="the answer has"):
        read(without(finished[0]))


def test_requests_that_come_while_it_ends_are_told():
    """Of the thread alone: nobody is left waiting, whenever the end comes."""

    class Slow:
        def step(self) -> list[Any]:
            return []

    thread = VLLMThread(Handling(Slow, add=lambda *_: None, read=lambda output: output, close=lambda engine: None))

    async def ask() -> list[Any]:
        waiting = [asyncio.create_task(thread.ask(MIXED[0])) for _ in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.get_running_loop().run_in_executor(None, thread.close)
        return await asyncio.gather(*waiting, thread.ask(MIXED[0]), return_exceptions=True)

    assert {str(outcome) for outcome in asyncio.run(ask())} == {"the engine was stopped"}
