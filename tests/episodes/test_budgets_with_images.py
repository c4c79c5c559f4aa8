"""Budgets of long episodes with images: nothing is over its limit, and no image is ever cut."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.engines import Engine, PolicyHandle, Reply, SamplingRequest
from lightning_agentrl.episodes.interaction import TurnInteraction
from lightning_agentrl.models.language_model import load_tokenizer, read_images
from lightning_agentrl.prompts.memory import FullMemory, Memory, WindowMemory
from lightning_agentrl.prompts.renderer import ChatRenderer, PromptFormat
from lightning_agentrl.rollout import EnvConfig, Session
from lightning_agentrl.rollout.fixed_turns import FixedTurns
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.types import Rollout, StopReason
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
    """Says what a function says, cut like the reply of a model, and keeps what it was asked."""

    def __init__(self, chat: ChatRenderer, say: Callable[[], str]) -> None:
        self.chat, self.say = chat, say
        self.asked: list[SamplingRequest] = []

    async def generate(self, request: SamplingRequest) -> Reply:
        self.asked.append(request)
        ids = [*self.chat.tokenizer.encode(self.say(), add_special_tokens=False), self.chat.template.turn_close_id]
        ids = ids[: request.max_tokens]
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


def played(
    folder: Path,
    words: PromptFormat,
    interaction: TurnInteraction,
    memory: Memory,
    turns: int,
    view: int,
    seed: int = 0,
) -> tuple[Rollout, list[SamplingRequest]]:
    chat = _renderer(folder, words)
    said = zooms(seed)
    engine = Scripted(chat, lambda: next(said))
    env = EnvConfig("agentrl_envs:ZoomSearch-v0", {"max_turns": 25, "view_px": view})
    session = Session(0, env.make_worker(), lambda episode: seed, chat, memory)
    try:
        player = Player(interaction, engine, memory.grows, temperature=1.0, seed=0)
        return asyncio.run(FixedTurns([session], turns).collect(player)), engine.asked
    finally:
        session.close()


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
)
def test_no_budget_is_ever_exceeded(
    folder: Path, most: int, images: int | None, reply: int, budget: int | None, turns: int, memory: Memory, seed: int
) -> None:
    words = PromptFormat(think=False, max_prompt_tokens=most, max_images=images)
    interaction = TurnInteraction(max_reply_tokens=reply, reply_budget=budget, max_turns=6)
    rollout, asked = played(folder, words, interaction, memory, turns, view=224, seed=seed)
    assert sum(len(sample.turns) for sample in rollout.samples) == turns
    for request in asked:
        assert len(request.prompt) <= most
        assert images is None or len(request.prompt.images) <= images
        assert request.max_tokens <= reply
    for sample in rollout.samples:
        assert len(sample.input) <= most + reply
        assert sample.segments[-1].is_action
        assert {image.tokens for image in sample.input.images} <= {64}
    replies: dict[int, int] = {}
    for turn, action in (
        (turn, action) for s in rollout.samples for turn, action in zip(s.turns, s.actions, strict=True)
    ):
        replies[turn.episode] = replies.get(turn.episode, 0) + len(action)
        assert (turn.stop is StopReason.REPLY_BUDGET) <= (budget is not None and replies[turn.episode] >= budget)
    assert budget is None or max(replies.values()) <= budget
