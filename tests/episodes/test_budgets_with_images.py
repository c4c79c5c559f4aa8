"""Budgets of long episodes with images: nothing is over its limit, and no image is ever cut."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import EnvWorker
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.interaction import TurnInteraction
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer, read_images
from lightning_agentrl.models.packing import pack
from lightning_agentrl.prompts.memory import FullMemory, Memory, WindowMemory
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.rollout import EnvConfig, Session
from lightning_agentrl.rollout.collector import FixedTurns
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.types import Rollout, Row, Sample, StopReason
from tests.rollout.scripted import LoggingEngine
from tests.tiny import tiny_vision_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that reads images of 896 pixels as 1,024 tokens."""
    folder = tiny_vision_folder(tmp_path_factory.mktemp("sees"), "qwen2_5_vl", patch_size=14)
    config = folder / "preprocessor_config.json"
    read = json.loads(config.read_text())
    read["size"]["longest_edge"] = 1280 * 28 * 28
    config.write_text(json.dumps(read))
    return folder


class Scripted(Engine):
    """Says what a function says, in words or ids, cut like the reply of a model, and keeps what it was asked."""

    def __init__(self, chat: ChatRenderer, say: Callable[[], str | list[int]]) -> None:
        self.chat, self.say = chat, say
        self.asked: list[SamplingRequest] = []

    async def generate(self, request: SamplingRequest) -> Reply:
        self.asked.append(request)
        said = self.say()
        ids = self.chat.template.encode(said) if isinstance(said, str) else said
        ids = [*ids, self.chat.template.turn_close_id][: request.max_tokens]
        return Reply(tuple(ids), (-1.0,) * len(ids), ids[-1] == self.chat.template.turn_close_id, policy_version=0)

    def start(self, handle: PolicyHandle) -> None: ...

    def sync(self, policy_version: int) -> None: ...

    def stop(self) -> None: ...


def zooms(seed: int) -> Iterator[str]:
    """Tool calls to parts that do not overlap much, with thoughts of different lengths before them."""
    draw = random.Random(seed)
    places = [(x, y) for x in range(0, 1000, 200) for y in range(0, 1000, 200)]
    draw.shuffle(places)
    for x, y in places:
        call = json.dumps({"name": "zoom", "arguments": {"box": [x, y, x + 190, y + 190]}})
        yield f"{'So I look there. ' * draw.randrange(4)}<tool_call>{call}</tool_call>"


def noise(chat: ChatRenderer, seed: int) -> Iterator[list[int]]:
    """Ids that no text is encoded to, placeholders of images among them."""
    draw = random.Random(seed)
    closes = chat.stop_token_ids
    while True:
        ids = [draw.randrange(len(chat.tokenizer)) for _ in range(draw.randrange(120))]
        yield [*(i for i in ids if i not in closes), *([chat.image_reader.placeholder] if chat.image_reader else [])]


def played(
    folder: Path,
    words: PromptFormat,
    interaction: TurnInteraction,
    memory: Memory,
    turns: int,
    view: int,
    seed: int = 0,
    nonsense: bool = False,
) -> tuple[Rollout, list[SamplingRequest]]:
    chat = _renderer(folder, words)
    said = noise(chat, seed) if nonsense else zooms(seed)
    engine = Scripted(chat, lambda: next(said))
    env = EnvConfig("agentrl_envs:ZoomSearch-v0", {"max_turns": 25, "view_px": view})
    session = Session(0, env.make_worker(), lambda episode: seed, chat, memory)
    try:
        player = Player(EnvPool([]), chat, memory, interaction, engine, seed=0)
        return asyncio.run(FixedTurns(player, [session], turns).collect()), engine.asked
    finally:
        session.worker.close()


@cache
def _renderer(folder: Path, words: PromptFormat) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(folder)), words, read_images(str(folder)))


@pytest.mark.slow
def test_twenty_turns_of_large_images_fit_into_32_000_tokens(folder: Path) -> None:
    words = PromptFormat(think=False, max_prompt_tokens=31_400)
    interaction = TurnInteraction(max_reply_tokens=600, reply_budget=12_000)
    rollout, asked = played(folder, words, interaction, FullMemory(), turns=20, view=896)
    (sample,) = rollout.samples
    assert len(sample.turns) == 20
    assert [len(request.prompt.images) for request in asked] == list(range(1, 21))
    assert {image.tokens for image in sample.input.images} == {1024}
    assert 20 * 1024 < len(sample.input) <= 32_000
    for before, after in itertools.pairwise(asked):
        assert after.prompt.keys[: len(before.prompt)] == before.prompt.keys


class Wandering(gymnasium.ActionWrapper):
    """Any reply is a look at another part of the picture."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(gymnasium.make("agentrl_envs:ZoomSearch-v0", disable_env_checker=True, **kwargs))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.said = zooms(seed or 0)
        return super().reset(seed=seed, options=options)

    def action(self, action: str) -> str:
        return next(self.said)


@pytest.mark.long
def test_a_model_samples_twenty_turns_within_32_000_tokens(folder: Path) -> None:
    """Replies of a random model; the trainer reads the whole episode as the engine read it turn by turn."""
    words = PromptFormat(think=False, max_prompt_tokens=31_400)
    interaction = TurnInteraction(max_reply_tokens=64, reply_budget=12_000)
    policy = LanguageModel(load_causal_lm(str(folder))).eval()
    engine = LoggingEngine()
    chat = _renderer(folder, words)
    engine.start(PolicyHandle(policy, chat.stop_token_ids, nullcontext))
    env = Environment(lambda: Wandering(max_turns=25, view_px=980))
    session = Session(0, EnvWorker(lambda: env), lambda episode: 0, chat, FullMemory())
    player = Player(EnvPool([]), chat, FullMemory(), interaction, engine, seed=0)
    try:
        rollout = asyncio.run(FixedTurns(player, [session], 20).collect())
    finally:
        session.worker.close()
        engine.stop()
    (sample,) = rollout.samples
    assert len(sample.turns) == len(sample.input.images) == 20
    assert {image.tokens for image in sample.input.images} == {35 * 35}
    assert 20 * 35 * 35 < len(sample.input) <= 32_000
    assert max(request.max_tokens for request, _ in engine.log) <= 64
    logps = score(policy, sample)
    torch.testing.assert_close(logps, rollout.rollout_logps[rollout.action_mask], atol=1e-4, rtol=0)


@torch.no_grad()
def score(policy: LanguageModel, sample: Sample) -> torch.Tensor:
    """Log-probs of the sampled tokens, as the trainer reads them."""
    packed = pack([Row(sample.input, tuple(p - 1 for p in sample.action_positions))], reader=policy.image_reader)
    return policy.token_scores(policy.hidden(packed), packed.targets, 1.0).logps


@pytest.mark.slow
@settings(max_examples=25)
@given(
    most=st.integers(900, 2500),
    images=st.one_of(st.none(), st.integers(1, 4)),
    reply=st.integers(20, 200),
    budget=st.one_of(st.none(), st.integers(60, 500)),
    turns=st.integers(1, 8),
    memory=st.sampled_from([FullMemory(), WindowMemory(2)]),
    seed=st.integers(0, 5),
    nonsense=st.booleans(),
)
def test_no_budget_is_ever_exceeded(
    folder: Path,
    most: int,
    images: int | None,
    reply: int,
    budget: int | None,
    turns: int,
    memory: Memory,
    seed: int,
    nonsense: bool,
) -> None:
    """What is trained on is what was sampled, all of it, behind what was asked, whatever ended an episode."""
    words = PromptFormat(think=False, max_prompt_tokens=most, max_images=images)
    interaction = TurnInteraction(max_reply_tokens=reply, reply_budget=budget, max_turns=6)
    rollout, asked = played(folder, words, interaction, memory, turns, view=224, seed=seed, nonsense=nonsense)
    assert sum(len(sample.turns) for sample in rollout.samples) == turns
    for request in asked:
        assert len(request.prompt) <= most
        assert images is None or len(request.prompt.images) <= images
        assert request.max_tokens <= reply
    for sample in rollout.samples:
        assert len(sample.input) <= most + reply
        assert sample.segments[-1].is_action
        assert {image.tokens for image in sample.input.images} <= {64}
    questions = iter(asked)
    for sample in rollout.samples:
        keys, end = sample.input.keys, 0
        for action in sample.actions:
            read = next(questions).prompt
            assert keys[: len(read)] == read.keys
            end = len(read) + len(action)
            assert keys[len(read) : end] == action.ids
        assert end == len(keys)
    sampled = [len(action) for sample in rollout.samples for action in sample.actions]
    assert int(rollout.action_mask.sum()) == sum(sampled)
    assert torch.equal(rollout.rollout_logps != 0, rollout.action_mask)
    replies: dict[int, int] = {}
    for turn, action in (
        (turn, action) for s in rollout.samples for turn, action in zip(s.turns, s.actions, strict=True)
    ):
        replies[turn.episode] = replies.get(turn.episode, 0) + len(action)
        assert (turn.stop is StopReason.REPLY_BUDGET) <= (budget is not None and replies[turn.episode] >= budget)
    assert budget is None or max(replies.values()) <= budget
