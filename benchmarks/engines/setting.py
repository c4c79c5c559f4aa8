"""What both measurements share: the demo model, an engine, and environments that only take time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import torch

from lightning_agentrl.engines import Engine, PolicyHandle
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import EnvWorker
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer
from lightning_agentrl.rollout import ChatRenderer, Interaction, PromptFormat, RawParser, Session, TurnInteraction
from lightning_agentrl.rollout import WindowMemory as Window
from lightning_agentrl.rollout.collector import FixedTurns
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.types import Rollout

MODEL = "demo"
PROMPT = PromptFormat(think=False, instruction="", max_prompt_tokens=600)
TEXT = "You are in a room with a red ball, a blue box and a door. You can go, turn, take, drop and open things. "


class Delay(gymnasium.Env):
    """Says where it is, and takes its time in each step."""

    system_prompt = TEXT * 4
    actions = {"go": "go"}  # noqa: RUF012
    default_action = "go"

    def __init__(self, index: int, delay: Callable[[random.Random], float]) -> None:
        self.random, self.delay = random.Random(index), delay
        self.delays: list[float] = []  # of its steps, as they were drawn
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "start", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.delays.append(self.delay(self.random))
        time.sleep(self.delays[-1])
        return f"place {self.count}, item {self.random.randint(0, 999)}", 0.0, False, False, {}


@dataclass
class Measured:
    """One collection."""

    rollout: Rollout
    seconds: float

    @property
    def tokens(self) -> int:
        return int(self.rollout.action_mask.sum())


class Setting:
    """Sessions with one engine; collections go on in the same episodes."""

    def __init__(
        self, engine: Engine, envs: Sequence[Delay], reply: int, model: str = MODEL, device: str = "cpu"
    ) -> None:
        self.engine, self.reply = engine, reply
        policy = LanguageModel(load_causal_lm(model)).eval().to(device)
        self.renderer = ChatRenderer(load_tokenizer(model), PROMPT)
        self.stop_token_ids = self.renderer.stop_token_ids
        self.executor = ThreadPoolExecutor(len(envs))
        self.loop = LoopThread()
        window = PROMPT.max_prompt_tokens + reply
        # On a GPU as with bf16-mixed.
        precision = partial(torch.autocast, device, torch.bfloat16) if device == "cuda" else nullcontext
        self.handle = PolicyHandle(policy, self.renderer.stop_token_ids, precision, max_model_len=window)
        engine.start(self.handle)
        engine.sync(0)
        self.begin(envs)

    def begin(self, envs: Sequence[Delay]) -> None:
        """Play in these environments from now on."""
        self.envs = envs
        self.sessions = [
            Session(
                i,
                EnvWorker(lambda env=env: Environment(lambda: env), self.executor),
                lambda episode, i=i: derive_seed(i, episode),
                self.renderer,
                Window(0),
            )
            for i, env in enumerate(envs)
        ]

    def collect(self, turns: int, interaction: Interaction | None = None) -> Measured:
        interaction = interaction or TurnInteraction(self.reply, RawParser())
        player = Player(EnvPool([]), self.renderer, Window(0), interaction, self.engine, seed=0)
        started = time.perf_counter()
        with self.engine.collecting():
            rollout = self.loop.run(FixedTurns(player, self.sessions, turns).collect())
        return Measured(rollout, time.perf_counter() - started)


@contextmanager
def setting(
    engine: Engine, envs: Sequence[Delay], reply: int, model: str = MODEL, device: str = "cpu"
) -> Iterator[Setting]:
    made = Setting(engine, envs, reply, model, device)
    try:
        yield made
    finally:
        engine.stop()
        made.loop.stop()
        made.executor.shutdown()
