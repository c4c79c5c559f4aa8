"""RolloutDataModule: environments, prompts, interaction and engine behind Lightning's data hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.distributed import all_gather
from lightning_agentrl.engines import Engine, PolicyHandle, TransformersEngine
from lightning_agentrl.metrics.episodes import EpisodeResult
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.rollout.chat import ChatRenderer, PromptFormat
from lightning_agentrl.rollout.checks import check_prompt
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.rollout.interaction import Interaction, TurnInteraction
from lightning_agentrl.rollout.loop import LoopThread
from lightning_agentrl.rollout.memory import Memory, WindowMemory
from lightning_agentrl.rollout.seeds import derive_seed, held_out_seeds
from lightning_agentrl.rollout.session import EnvConfig, Session
from lightning_agentrl.rollout.stream import Learner, RolloutStream
from lightning_agentrl.rollout.validation import EpisodeSeeds, ValidationConfig, play_episodes
from lightning_agentrl.rollout.watchdog import Watchdog
from lightning_agentrl.types import Rollout


class RolloutLearner(Learner, Protocol):
    """What the data module asks of the agent it is connected to."""

    clock: StageClock
    tokenizer: PreTrainedTokenizerBase
    temperature: float

    @property
    def policy_version(self) -> int: ...

    def policy_handle(self, close_ids: Sequence[int]) -> PolicyHandle: ...


class RolloutDataModule(L.LightningDataModule):
    """Streams fixed-turn rollouts for training and plays held-out episodes for validation.

    An iteration collects ``num_envs * turns_per_env`` turns. Environments live on from one iteration to the next, so
    long episodes never hold up a step.

    Args:
        env: the environment, as gymnasium.make takes it.
        num_envs: environments over all ranks.
        turns_per_env: turns of each environment per iteration.
        mini_batch_turns: turns of one optimizer step over all ranks; divides the turns of an iteration.
        update_epochs: passes over each rollout.
        memory: what of the past a prompt shows; the last turn by default.
        prompt: how prompts are worded; the defaults of PromptFormat when not given.
        interaction: the turn loop; TurnInteraction when not given.
        engine: what samples the replies; transformers in process by default.
        validation: what validation plays; the defaults of ValidationConfig when not given.
        stall_seconds: when no environment has moved for so long, warn and say what is waited for; again after each
            further so many seconds. 0: never.
        seed: of episodes, sampling and shuffling; the seed of ``seed_everything`` when not given.
    """

    def __init__(
        self,
        env: EnvConfig,
        num_envs: int = 32,
        turns_per_env: int = 8,
        mini_batch_turns: int = 128,
        update_epochs: int = 1,
        memory: Memory | None = None,
        prompt: PromptFormat | None = None,
        interaction: Interaction | None = None,
        engine: Engine | None = None,
        validation: ValidationConfig | None = None,
        stall_seconds: float = 300.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.env = env
        self.num_envs = num_envs
        self.turns_per_env = turns_per_env
        self.mini_batch_turns = mini_batch_turns
        self.update_epochs = update_epochs
        self.memory = memory or WindowMemory()
        self.prompt = prompt or PromptFormat()
        self.interaction = interaction or TurnInteraction()
        self.engine = engine or TransformersEngine()
        self.validation = validation or ValidationConfig()
        self.stall_seconds = stall_seconds
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self._check_sizes()
        self.sessions: list[Session] = []
        self.stream: RolloutStream | None = None
        self._learner: RolloutLearner | None = None
        self._renderer: ChatRenderer | None = None
        self._loop: LoopThread | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._saved_sessions: dict[int, dict[str, Any]] = {}
        self._saved_iteration = 0
        self._saved_origin = ""
        self._trained: RolloutLearner | None = None  # whose training the saved episodes belong to

    @property
    def turns_per_rollout(self) -> int:
        return self.num_envs * self.turns_per_env

    @property
    def own_envs(self) -> range:
        """The environments of this rank, numbered over all ranks."""
        rank, world = self._place
        share = self.num_envs // world
        return range(rank * share, (rank + 1) * share)

    @property
    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps, which are the mini-batches of a Lightning epoch."""
        return self.turns_per_rollout // self.mini_batch_turns * self.update_epochs

    def _check_sizes(self) -> None:
        for name in ("num_envs", "turns_per_env", "mini_batch_turns", "update_epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.init_args.{name} must be at least 1, got {getattr(self, name)}")
        if self.stall_seconds < 0:
            raise ValueError(f"data.init_args.stall_seconds must be at least 0, got {self.stall_seconds}")
        if self.turns_per_rollout % self.mini_batch_turns:
            raise ValueError(
                f"an iteration has num_envs * turns_per_env = {self.num_envs} * {self.turns_per_env} = "
                f"{self.turns_per_rollout} turns, which do not divide into mini-batches of {self.mini_batch_turns}; "
                "change data.init_args.mini_batch_turns"
            )
        if self.memory.grows and self.num_envs < self.turns_per_rollout // self.mini_batch_turns:
            raise ValueError(
                f"{type(self.memory).__name__} keeps the turns of an episode in one sample, so each mini-batch needs "
                f"an environment: {self.turns_per_rollout // self.mini_batch_turns} mini-batches, {self.num_envs} "
                "environments; raise data.init_args.num_envs or mini_batch_turns"
            )

    # Lightning hooks

    def setup(self, stage: str) -> None:
        """Make one environment and look for the engine's packages, before models are loaded."""
        self.env.make().close()
        self.engine.check()
        self.check_processes(self._place[1])

    def check_processes(self, world: int) -> None:
        """Refuse a number of processes that cannot share the environments.

        Raises:
            ValueError: with the key to change.
        """
        if self.num_envs % world:
            raise ValueError(
                f"{self.num_envs} environments cannot be shared evenly by {world} processes; "
                "change data.init_args.num_envs or trainer.devices"
            )

    def train_dataloader(self) -> RolloutStream:
        if self.stream is None:
            raise RuntimeError("the data module is not connected to an agent; call connect(agent) first")
        return self.stream

    def val_dataloader(self) -> EpisodeSeeds:
        return EpisodeSeeds(self.validation_seeds())

    def validation_seeds(self) -> list[int]:
        """The held-out seeds that this rank plays."""
        rank, world = self._place
        return list(held_out_seeds()[: self.validation.episodes][rank::world])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # rollouts are moved micro-batch by micro-batch

    def teardown(self, stage: str) -> None:
        """Stop engine, event loop and environments. Their state was saved by ``state_dict`` where it was asked for."""
        if self._loop is None:
            return
        self.engine.stop()
        self._loop.stop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        if self.sessions:
            self._saved_sessions = {session.index: session.state_dict() for session in self.sessions}
            self._saved_origin = self._origin
        self._saved_iteration = self.stream.iteration if self.stream else 0
        for session in self.sessions:
            session.close()
        self.sessions, self._loop, self._executor, self._learner = [], None, None, None

    def state_dict(self) -> dict[str, Any]:
        """Every environment of every rank, as seed and actions of its running episode.

        Raises:
            RuntimeError: inside an iteration, whose scored rollout would be lost.
        """
        if self.stream is not None and self.stream.inside_iteration:
            raise RuntimeError(
                "a checkpoint inside an iteration would lose its scored rollout; save at iteration ends: "
                "ModelCheckpoint(save_on_train_epoch_end=True) without every_n_train_steps"
            )
        own = {session.index: session.state_dict() for session in self.sessions} or self._saved_sessions
        return {
            "sessions": {index: state for part in all_gather(own) for index, state in part.items()},
            "iteration": self.stream.iteration if self.stream else self._saved_iteration,
            "origin": self._origin,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts; validation needs none of it."""
        self._saved_sessions, self._saved_iteration = state_dict["sessions"], state_dict["iteration"]
        self._saved_origin = state_dict["origin"]
        self._trained = None
        if self.stream is not None:  # sharded strategies load after the agent was connected
            self.stream.iteration = self._saved_iteration

    @property
    def _origin(self) -> str:
        """What the episodes of a run follow from."""
        return f"{self.env.id} with {dict(sorted(self.env.kwargs.items()))}, seed {self.seed}"

    # What the agent calls

    def connect(self, learner: RolloutLearner) -> None:
        """Build what needs the agent: prompts, engine, sessions, stream. Harmless when called again."""
        if self._learner is learner:
            return
        if self._trained is not None and self._trained is not learner:  # another agent starts afresh
            self._saved_sessions, self._saved_iteration = {}, 0
        self._renderer = ChatRenderer(learner.tokenizer, self.prompt)
        threads = max(len(self.own_envs), self.validation.num_envs)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="env")
        longest = self.prompt.max_prompt_tokens + self.interaction.max_reply_tokens
        handle = replace(learner.policy_handle(self._renderer.close_ids), longest=longest)
        self._check_prompts(handle)
        self._loop = self._loop or LoopThread()
        self.engine.start(handle)
        self.stream = RolloutStream(
            collect=self.collect,
            learner=learner,
            num_envs=self.num_envs,
            mini_batches=self.turns_per_rollout // self.mini_batch_turns,
            update_epochs=self.update_epochs,
            seed=self.seed,
        )
        self.stream.iteration = self._saved_iteration
        self._learner = learner  # last: a refused configuration leaves nothing connected

    def collect(self) -> Rollout:
        """The next rollout of this rank, sampled with the current weights."""
        learner, loop = self._connected()
        with learner.clock.stage("collect", total=len(self.own_envs) * self.turns_per_env):
            self.engine.sync(learner.policy_version)
            collector = self._collector(learner.temperature, learner.clock)
            self._begin_training()
            with self._guarded(collector):
                rollout = loop.run(collector.fixed_turns(self.sessions, self.turns_per_env))
        tokens = sum(len(segment.ids) for sample in rollout.samples for segment in sample.segments)
        learner.clock.count("collect", turns=len(rollout.turns), tokens=tokens)
        return rollout

    def _begin_training(self) -> None:
        """Make the environments of this rank when they are first needed, and continue their saved episodes."""
        if self.sessions:
            return
        if self._saved_sessions and self._saved_origin != self._origin:
            raise ValueError(
                f"the checkpoint's environments are {self._saved_origin}; this run has {self._origin}, so their "
                "episodes cannot go on: give the same data.init_args.env and seed, or start without --ckpt_path"
            )
        sessions = [self._make_session(i, self._training_seed(i), pictures=True) for i in self.own_envs]
        for session in sessions:
            if session.index in self._saved_sessions:
                session.load_state_dict(self._saved_sessions[session.index])
        self.sessions, self._trained = sessions, self._learner

    @property
    def renderer(self) -> ChatRenderer:
        """How prompts are made; there once an agent is connected."""
        self._connected()
        assert self._renderer is not None
        return self._renderer

    def first_prompts(self, most: int = 16) -> list[tuple[int, ...]]:
        """Ids of the first prompts of some training environments, to be looked at before a run."""
        prompts = []
        for index in self.own_envs[:most]:
            session = self.first_session(index)
            prompts.append(session.prompt().ids)
            session.close()
        return prompts

    def first_session(self, index: int = 0) -> Session:
        """An environment at the start of its first training episode, apart from those that are trained on."""
        session = self._make_session(index, self._training_seed(index))
        session.begin()
        return session

    def play_held_out(self, seeds: Sequence[int]) -> list[EpisodeResult]:
        """Play one whole episode for each seed with the current weights; training environments stay untouched."""
        learner, loop = self._connected()
        with learner.clock.stage("validate", total=len(seeds)):
            self.engine.sync(learner.policy_version)
            collector = self._collector(self.validation.temperature, learner.clock)
            with self._guarded(collector):
                return loop.run(play_episodes(seeds, self.validation.num_envs, self._make_session, collector))

    def _connected(self) -> tuple[RolloutLearner, LoopThread]:
        if self._learner is None or self._loop is None:
            raise RuntimeError("the data module is not connected to an agent; call connect(agent) first")
        return self._learner, self._loop

    def _collector(self, temperature: float, clock: StageClock) -> Collector:
        watchdog = Watchdog(self.stall_seconds, type(self.engine).__name__, lambda: clock.running)
        return Collector(
            self.interaction, self.engine, self.memory.grows, temperature, self.seed, clock.advance, watchdog
        )

    @contextmanager
    def _guarded(self, collector: Collector) -> Iterator[None]:
        assert collector.watchdog is not None
        with self.engine.collecting(), collector.watchdog.on_guard():
            yield

    def _training_seed(self, index: int) -> Callable[[int], int]:
        return lambda episode: derive_seed(self.seed, index, episode)

    def _make_session(self, index: int, episode_seed: Callable[[int], int], pictures: bool = False) -> Session:
        assert self._renderer is not None
        assert self._executor is not None
        return Session(
            index,
            self.env.make(),
            episode_seed,
            self._renderer,
            self.memory,
            self._executor,
            remake=self.env.make,
            retries=self.env.retries,
            pictures=pictures,
        )

    def _check_prompts(self, handle: PolicyHandle) -> None:
        assert self._renderer is not None
        assert self._executor is not None
        session = self._make_session(0, lambda _episode: 0)
        try:
            check_prompt(session, self.interaction, handle.policy.context_length)
        finally:
            session.close()
