"""Conversations whose keys and values are kept: what is sampled is what a fresh reading gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch

from lightning_agentrl.engines import PolicyHandle, Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm
from tests.engines.test_transformers_engine import batches_of, serve
from tests.inputs import random_ids, text
from tests.tiny import tiny_model_folder

PLAYERS = 3


@pytest.fixture(scope="module", params=["qwen2", "gemma3_text", "mistral"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Two of them have layers with a window that is shorter than a conversation."""
    folder = tmp_path_factory.mktemp(request.param)
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    settings = {"qwen2": {}, "mistral": {"sliding_window": 16}, "gemma3_text": {**windows, "query_pre_attn_scalar": 8}}
    return LanguageModel(load_causal_lm(str(tiny_model_folder(folder, request.param, **settings[request.param]))))


@pytest.fixture
def engine(policy: LanguageModel) -> Iterator[TransformersEngine]:
    engine = TransformersEngine()
    engine.gather_seconds = 0.02
    engine.start(PolicyHandle(policy, (), nullcontext))
    engine.sync(0)
    yield engine
    engine.stop()


def play(engine: TransformersEngine, turns: int, forget: bool = False) -> list[list[tuple[SamplingRequest, Reply]]]:
    """Let players talk for some turns: each prompt is all before it and some new tokens, of another number for each."""
    talks: list[tuple[int, ...]] = [random_ids(player, 40 + player) for player in range(PLAYERS)]
    played = []
    for turn in range(turns):
        requests = [
            SamplingRequest(text(*talk), 5, 1.0, seed=100 * turn + player, number=(player, turn))
            for player, talk in enumerate(talks)
        ]
        replies = serve(engine, requests)
        played.append(list(zip(requests, replies, strict=True)))
        for player, reply in enumerate(replies):
            talks[player] = (*talks[player], *reply.ids, *random_ids(1000 * turn + player, 3 + 2 * player))
        if forget:
            engine.sync(0)
    return played


def differences(one: Sequence[Reply], other: Sequence[Reply]) -> float:
    assert [reply.ids for reply in one] == [reply.ids for reply in other]
    pairs = zip((x for reply in one for x in reply.logps), (x for reply in other for x in reply.logps), strict=True)
    return max(abs(a - b) for a, b in pairs)


def test_a_conversation_that_goes_on_reads_what_is_new_and_gives_the_same(
    engine: TransformersEngine, policy: LanguageModel
) -> None:
    kept = play(engine, 5)
    fresh = play(engine, 5, forget=True)
    for with_past, without in zip(kept, fresh, strict=True):
        assert differences([r for _, r in with_past], [r for _, r in without]) < 1e-5
    last = [request for request, _ in kept[-1]]
    with batches_of(policy) as shapes:
        serve(engine, last)  # forgotten by now
    assert shapes[0][1] > 100
    engine.sync(0)
    play(engine, 4)
    with batches_of(policy) as shapes:
        serve(engine, last)
    assert shapes[0] == (PLAYERS, 3 + 2 * (PLAYERS - 1) + 1)  # the last sampled token is new too


def test_an_edited_conversation_is_read_anew(engine: TransformersEngine, policy: LanguageModel) -> None:
    (first, _, _), *_ = play(engine, 2)
    prompt = first[0].prompt.ids
    edited = SamplingRequest(text(*prompt[:-5], *random_ids(7, 4)), 6, 1.0, seed=9, number=(0, 9))
    (with_past,) = serve(engine, [edited])
    engine.sync(0)
    (fresh,) = serve(engine, [edited])
    assert (with_past.ids, with_past.logps) == (fresh.ids, fresh.logps)


def test_nothing_is_kept_over_new_weights(engine: TransformersEngine, policy: LanguageModel) -> None:
    (first, *_), *_ = play(engine, 1)
    again = SamplingRequest(text(*first[0].prompt.ids, *first[1].ids, 3, 4), 4, 1.0, seed=5, number=(0, 1))
    weight = policy.lm.get_input_embeddings().weight
    with torch.no_grad():
        weight.mul_(1.5)
    engine.sync(1)
    (after,) = serve(engine, [again])
    engine.sync(1)
    (fresh,) = serve(engine, [again])
    with torch.no_grad():
        weight.div_(1.5)
    assert (after.ids, after.logps) == (fresh.ids, fresh.logps)


def test_the_oldest_conversations_are_dropped(engine: TransformersEngine, policy: LanguageModel) -> None:
    engine._batch.most_tokens = 100
    played = play(engine, 3)
    assert sum(len(one.keys) for one in engine._batch._conversations.values()) <= 100
    assert len(played) == 3
