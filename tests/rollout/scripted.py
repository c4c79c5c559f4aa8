"""Small environments that do what a test says, and a workplace of real parts around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import gymnasium
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.engines import PolicyHandle, Reply, SamplingRequest, TransformersEngine
from lightning_agentrl.engines.transformers.admission import Rule
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import EnvWorker
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.metrics.episodes import EpisodeResult
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import load_causal_lm, load_tokenizer, read_images
from lightning_agentrl.rollout import (
    ChatRenderer,
    Interaction,
    Memory,
    Prepared,
    PromptFormat,
    RawParser,
    RolloutDataModule,
    Session,
    TurnInteraction,
    WindowMemory,
)
from lightning_agentrl.rollout.collector import Connection, FixedTurns
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.types import ForkPlan, Rollout, Turn


class Scripted(gymnasium.Env):
    """Counts steps. Reward of step n (from 1) is n; ends after ``length`` steps in the way that ``end`` says.

    Args:
        length: steps of an episode.
        end: "terminated", "truncated" or "both".
        invalid: steps (from 1) that the environment reports as invalid.
        on_step: called in every step with its number.
    """

    def __init__(
        self,
        length: int = 3,
        end: str = "terminated",
        invalid: Sequence[int] = (),
        on_step: Callable[[int], Any] = lambda count: None,
    ) -> None:
        self.length, self.end, self.invalid, self.on_step = length, end, invalid, on_step
        self.seeds: list[int | None] = []
        self.steps: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.count, self.key = 0, int(self.np_random.integers(1000))
        return self._text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.on_step(self.count + 1)
        self.count += 1
        self.steps.append(action)
        over = self.count == self.length
        info = {"invalid_action": True} if self.count in self.invalid else {}
        ends = (over and self.end in ("terminated", "both"), over and self.end in ("truncated", "both"))
        return self._text(), float(self.count), *ends, info

    def _text(self) -> str:
        return f"key {self.key} step {self.count}"


class Varied(Scripted):
    """Episodes of 1 to 4 steps, by the seed; an action of an even number of letters makes this one step longer."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        answer = super().reset(seed=seed)
        self.length = 1 + self.key % 3
        return answer

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.count == 0 and len(action) % 2 == 0:
            self.length += 1
        return super().step(action)


gymnasium.register("Varied-v0", Varied)


class LoggingEngine(TransformersEngine):
    """Keeps every request with its reply."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.log: list[tuple[SamplingRequest, Reply]] = []

    async def generate(self, request: SamplingRequest) -> Reply:
        reply = await super().generate(request)
        self.log.append((request, reply))
        return reply


FREE_TEXT = PromptFormat(think=False, max_prompt_tokens=600)


class Workplace:
    """Sessions of given environments with a real engine and a real renderer."""

    def __init__(
        self,
        folder: str,
        envs: Sequence[gymnasium.Env],
        memory: Memory | None = None,
        interaction: Interaction | None = None,
        prompt: PromptFormat = FREE_TEXT,
        seed: int = 0,
        admission: Rule = "by_number",
    ) -> None:
        self.memory = memory or WindowMemory()
        self.interaction = interaction or TurnInteraction(max_reply_tokens=4, parser=RawParser())
        self.policy = LanguageModel(load_causal_lm(folder).double())
        self.renderer = ChatRenderer(load_tokenizer(folder), prompt, read_images(str(folder)))
        self.executor = ThreadPoolExecutor(len(envs))
        self.loop = LoopThread()
        self.seed = seed
        self.engine = LoggingEngine(admission=admission)
        self.engine.start(PolicyHandle(self.policy, self.renderer.stop_token_ids, nullcontext))
        self.sessions = [self.session(i, env) for i, env in enumerate(envs)]

    def session(self, index: int, env: gymnasium.Env) -> Session:
        def episode_seed(episode: int) -> int:
            return derive_seed(self.seed, index, episode)

        return Session(index, self.worker(lambda: env), episode_seed, self.renderer, self.memory)

    def worker(self, make: Callable[[], gymnasium.Env], retries: int = 0) -> EnvWorker:
        """Environments in threads."""
        return EnvWorker(lambda: Environment(make), self.executor, retries)

    @property
    def player(self) -> Player:
        return Player(EnvPool([]), self.renderer, self.memory, self.interaction, self.engine, self.seed)

    def collect(self, turns: int) -> Rollout:
        return self.loop.run(FixedTurns(self.player, self.sessions, turns).collect())

    def episode(self, session: Session) -> list[Turn]:
        samples, lost = self.loop.run(self.player.play_episode(session))
        assert not lost
        return [turn for sample in samples for turn in sample.turns]

    def text(self, ids: Sequence[int]) -> str:
        return self.renderer.tokenizer.decode(list(ids), skip_special_tokens=False)

    def close(self) -> None:
        self.engine.stop()
        self.loop.stop()
        self.executor.shutdown()


@contextmanager
def workplace(folder: Any, envs: Sequence[gymnasium.Env], **settings: Any) -> Iterator[Workplace]:
    place = Workplace(str(folder), envs, **settings)
    try:
        yield place
    finally:
        place.close()


LEARNERS: WeakKeyDictionary[RolloutDataModule, Learner] = WeakKeyDictionary()


class Learner:
    """A real model for a data module to collect with; it scores nothing."""

    temperature = 1.0
    policy_version = 0
    greedy_baseline = False
    forks: ForkPlan | None = None

    def __init__(self, folder: Any) -> None:
        self.clock = StageClock()
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(folder))
        self.policy = LanguageModel(load_causal_lm(str(folder)).double())
        self.context_length = self.policy.context_length

    def connect(self, data: RolloutDataModule) -> None:
        """Do what an agent does when a run starts; ``LEARNERS[data]`` is then this one."""
        LEARNERS[data] = self
        data.use_model(self.tokenizer, self.context_length)
        connection = Connection(
            PolicyHandle(
                self.policy,
                data.player.renderer.stop_token_ids,
                nullcontext,
                max_model_len=data.longest_turn,
                trained_meanwhile=data.max_staleness > 0,
            ),
            prepare=lambda rollout: Prepared(rollout, {}),
            policy_version=lambda: self.policy_version,
            held_steps=lambda: range(0),
            clock=self.clock,
            temperature=self.temperature,
            after_sync=self.after_sync,
            greedy_baseline=self.greedy_baseline,
            forks=self.forks,
        )
        data.connect(connection)

    def after_sync(self) -> None:
        """Do nothing."""


def play_held_out(data: RolloutDataModule, seeds: Sequence[int]) -> list[EpisodeResult]:
    """Results of held-out episodes with the current weights of the data module's learner."""
    return data.collector.play_held_out(seeds, data.validation)[0]


def story(rollout: Rollout) -> list[tuple]:
    """All that a rollout says except how long things took."""
    return [
        (t.env, t.episode, t.index, t.observation, t.reply, t.action, t.valid, t.reward, t.stop, sample.ids)
        for sample in rollout.samples
        for t in sample.turns
    ]
