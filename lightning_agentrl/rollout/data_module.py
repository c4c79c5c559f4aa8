"""RolloutDataModule: environments, prompts, interaction and engine behind Lightning's data hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.engines import Engine, TransformersEngine
from lightning_agentrl.episodes.interaction import Interaction, TurnInteraction
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.episodes.sources import EnvConfig, EnvMix, all_sources
from lightning_agentrl.episodes.tasks import TaskSet
from lightning_agentrl.metrics.episodes import EpisodeResult
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.prompts.memory import Memory, WindowMemory
from lightning_agentrl.prompts.renderer import ChatRenderer, PromptFormat
from lightning_agentrl.rollout.background import NextRollout
from lightning_agentrl.rollout.collection import Collection
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.groups import GroupRollout
from lightning_agentrl.rollout.learner import RolloutLearner
from lightning_agentrl.rollout.session_maker import SessionMaker
from lightning_agentrl.rollout.sizes import MINI_BATCH_TURNS, TURNS_PER_ENV, RolloutSizes
from lightning_agentrl.rollout.staleness import check_staleness
from lightning_agentrl.rollout.state import SavedRollouts
from lightning_agentrl.rollout.stream import OneStepOffPolicy, RolloutStream
from lightning_agentrl.rollout.validation import EpisodeSeeds, ValidationConfig, play_episodes
from lightning_agentrl.rollout.watchdog import Watchdog
from lightning_agentrl.types import Rollout


class RolloutDataModule(RolloutSizes):
    """Streams rollouts for training and plays held-out episodes for validation.

    An iteration collects ``num_envs * turns_per_env`` turns. Environments live on from one iteration to the next, so
    long episodes never hold up a step. With ``groups`` it collects whole episodes instead, several from each start.
    With ``max_staleness`` it collects the next rollout while the current one is trained on.

    Args:
        env: the environment, as gymnasium.make takes it. May be left out where there are tasks.
        num_envs: environments that play at a time, over all ranks.
        turns_per_env: turns of each environment per iteration; not with ``groups``.
        mini_batch_turns: turns of one optimizer step over all ranks; divides the turns of an iteration. Not with
            ``groups``.
        other_envs: further environments that are played beside ``env``, each by its share.
        tasks: one-turn tasks without an environment, played beside the environments or alone.
        groups: collect whole groups of episodes, as estimators that compare episodes need them; None: a fixed number of
            turns.
        update_epochs: passes over each rollout.
        memory: what of the past a prompt shows; the last turn by default.
        prompt: how prompts are worded; the defaults of PromptFormat when not given.
        interaction: the turn loop; TurnInteraction when not given.
        engine: what samples the replies; transformers in process by default.
        validation: what validation plays; the defaults of ValidationConfig when not given.
        max_staleness: most iterations by which the weights that sampled a turn may be behind those that it trains. 0:
            collect, then train. From 1 on: collect the next rollout while this one trains.
        stall_seconds: when no environment has moved for so long, or the engine has not taken over the weights, warn and
            say what is waited for; again after each further so many seconds. 0: never.
        seed: of episodes, sampling and shuffling; the seed of ``seed_everything`` when not given.
    """

    def __init__(
        self,
        env: EnvConfig | None = None,
        num_envs: int = 32,
        turns_per_env: int = TURNS_PER_ENV,
        mini_batch_turns: int = MINI_BATCH_TURNS,
        other_envs: list[EnvConfig] | None = None,
        tasks: TaskSet | None = None,
        groups: GroupRollout | None = None,
        update_epochs: int = 1,
        memory: Memory | None = None,
        prompt: PromptFormat | None = None,
        interaction: Interaction | None = None,
        engine: Engine | None = None,
        validation: ValidationConfig | None = None,
        max_staleness: int = 0,
        stall_seconds: float = 300.0,
        seed: int | None = None,
    ) -> None:
        mix = EnvMix(all_sources(env, other_envs or [], tasks))
        super().__init__(num_envs, turns_per_env, mini_batch_turns, groups, update_epochs, memory or WindowMemory())
        if stall_seconds < 0:
            raise ValueError(f"data.init_args.stall_seconds must be at least 0, got {stall_seconds}")
        self.mix = mix
        self.max_staleness = max_staleness
        self.prompt = prompt or PromptFormat()
        self.interaction = interaction or TurnInteraction()
        self.engine = engine or TransformersEngine()
        check_staleness(max_staleness, groups, self.engine)
        self.validation = validation or ValidationConfig()
        self.stall_seconds = stall_seconds
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.collection: Collection | None = None
        self.stream: RolloutStream | None = None
        self._learner: RolloutLearner | None = None
        self._session_maker: SessionMaker | None = None
        self._loop: LoopThread | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._saved = SavedRollouts()
        self._next = NextRollout(max_staleness)
        self._trained: RolloutLearner | None = None  # whose training the saved episodes belong to

    @property
    def sessions(self) -> Sequence[Session]:
        """The training environments of this rank where an episode is running."""
        return () if self.collection is None else self.collection.sessions

    # Lightning hooks

    def setup(self, stage: str) -> None:
        """Make one environment of each kind and look for the engine's packages, before models are loaded."""
        for source in self.mix.sources:
            worker = source.make_worker()
            worker.wait()
            worker.close()
        self.engine.check()
        self.check_processes(self._place[1])

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
        self._settle()
        self.engine.stop()
        self._loop.stop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        self._saved = self._current()
        if error := self._next.untold:
            rank_zero_warn(f"the rollout that nobody waits for any more has failed: {type(error).__name__}: {error}")
        if self.collection is not None:
            self.collection.close()
        self.collection, self._loop, self._executor, self._learner = None, None, None, None
        self._next = NextRollout(self.max_staleness)

    def on_exception(self, exception: BaseException) -> None:
        """End what is collected in the background."""
        self._next.cancel()

    def state_dict(self) -> dict[str, Any]:
        """The running episodes of every rank as seeds and actions; with groups, also the turns of those begun.

        What is collected in the background is waited for and saved. If that fails, the environments are saved as they
        were when it began.

        Raises:
            RuntimeError: inside an iteration, whose scored rollout would be lost.
        """
        if self.stream is not None and self.stream.inside_iteration:
            raise RuntimeError(
                "a checkpoint inside an iteration would lose its scored rollout; save at iteration ends: "
                "ModelCheckpoint(save_on_train_epoch_end=True) without every_n_train_steps"
            )
        self._settle()
        return replace(self._current(), origin=self._origin).to_plain()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts; validation needs none of it."""
        self._saved = SavedRollouts.from_plain(state_dict)
        self._trained = None
        if self.stream is not None:  # sharded strategies load after the agent was connected
            self.stream.iteration = self._saved.iteration

    def _current(self) -> SavedRollouts:
        """Where this rank is."""
        iteration = self.stream.iteration if self.stream else self._saved.iteration
        if self.collection is None:
            return replace(self._saved, iteration=iteration)
        before, ready = self._next.before, self._next.collected
        own = self.collection.state_dict() if before is None else before  # where it goes on, if the next one failed
        ahead = None if ready is None else ready.rollout
        return SavedRollouts(own, iteration, self._saved.collected, self._origin, ahead)

    @property
    def _origin(self) -> str:
        """What the episodes of a run follow from."""
        groups = "" if self.groups is None else f", {self.groups.per_rollout} groups of {self.groups.size}"
        return f"{self.mix.label}{groups}, seed {self.seed}"

    # What the agent calls

    def connect(self, learner: RolloutLearner) -> None:
        """Build what needs the agent: prompts, engine, sessions, stream. Harmless when called again."""
        if self._learner is learner:
            if not self._next.cancelled:
                return
            self.teardown("fit")  # an interrupt ended a collection; go on from where it had begun
        if self._trained is not None and self._trained is not learner:  # another agent starts afresh
            self._saved = SavedRollouts()
        renderer = ChatRenderer(learner.tokenizer, self.prompt)
        threads = max(self.at_a_time, self.validation.num_envs)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="env")
        self._session_maker = SessionMaker(self.mix, self.groups, renderer, self.memory, self._executor, self.seed)
        longest = self.prompt.max_prompt_tokens + self.interaction.max_reply_tokens
        handle = learner.policy_handle(renderer.close_ids)
        handle = replace(handle, longest=longest, trained_meanwhile=self.max_staleness > 0)
        self._session_maker.check_prompts(self.interaction, handle.policy.context_length)
        for source in self.mix.sources:
            source.start(next(handle.policy.parameters()).device)
        self._loop = self._loop or LoopThread()
        self.engine.start(handle)
        self.stream = RolloutStream(
            collect=self.collect,
            learner=learner,
            num_envs=self.envs_per_rollout,
            mini_batches=self.mini_batches,
            update_epochs=self.update_epochs,
            seed=self.seed,
            source=OneStepOffPolicy(self.begin_next) if self.max_staleness else None,
        )
        self.stream.iteration = self._saved.iteration
        self._learner = learner  # last: a refused configuration leaves nothing connected

    def collect(self) -> Rollout:
        """The next rollout of this rank: the one that was begun before, or one sampled with the current weights."""
        learner, _ = self._connected()
        self._begin_training(learner)
        self._settle()
        ready = self._next.take(learner.policy_version, self.steps_per_iteration)
        rollout = self._collect_now(learner) if ready is None else ready.rollout
        tokens = sum(len(segment.ids) for sample in rollout.samples for segment in sample.segments)
        beside = None if ready is None else ready.seconds
        learner.clock.count("collect", turns=len(rollout.turns), tokens=tokens, beside=beside)
        return rollout

    def _collect_now(self, learner: RolloutLearner) -> Rollout:
        _, loop = self._connected()
        collection = self._begin_training(learner)
        with learner.clock.stage("collect", total=collection.total):
            self._send_weights(learner)
            collector = self._collector(learner.temperature, learner.clock)
            with self._guarded(collector):
                rollout = loop.run(collection.collect(collector))
        self._saved.collected += 1
        return rollout

    def begin_next(self) -> None:
        """Begin to collect the next rollout with the current weights, while the agent goes on."""
        learner, loop = self._connected()
        collection = self._begin_training(learner)
        with learner.clock.stage("collect"):
            self._send_weights(learner)
        collector = self._collector(learner.temperature, learner.clock, "collect")
        self._next.begin(collection, collector, loop, learner.clock)

    def _send_weights(self, learner: RolloutLearner) -> None:
        with learner.clock.part("sync"), self._watchdog(learner.clock).taking_weights():
            self.engine.sync(learner.policy_version)

    def _settle(self) -> None:
        """Wait for what is collected in the background."""
        if self._next.settle():
            self._saved.collected += 1

    def _begin_training(self, learner: RolloutLearner) -> Collection:
        """Make the environments of this rank when they are first needed, and continue their saved episodes."""
        if self.collection is not None:
            return self.collection
        self._saved.check_origin(self._origin)
        collection = self._new_collection(self._maker, learner.needs_greedy_baseline, self._saved.collected)
        collection.load_state_dict(self._saved.sessions)
        if self._saved.ahead is not None:
            turns = self.turns_per_rollout if self.groups is None else None
            self._next.adopt(self._saved.ahead, self.own_envs, self.envs_per_rollout, turns)
            self._saved.ahead = None
        self.collection, self._trained = collection, learner
        return collection

    @property
    def renderer(self) -> ChatRenderer:
        """How prompts are made; there once an agent is connected."""
        return self._maker.renderer

    def first_prompts(self, most: int = 16) -> list[tuple[int, ...]]:
        """Ids of the first prompts of some training environments, to be looked at before a run."""
        prompts = []
        step = 1 if self.groups is None else self.groups.size  # all of a group begin alike
        for index in self.own_envs[: most * step : step]:
            session = self.first_session(index)
            prompts.append(session.prompt().ids)
            session.close()
        return prompts

    def first_session(self, index: int = 0) -> Session:
        """An environment at the start of its first training episode, apart from those that are trained on."""
        return self._maker.first(index)

    def play_held_out(self, seeds: Sequence[int]) -> list[EpisodeResult]:
        """Play one whole episode for each seed with the current weights; training environments stay untouched."""
        learner, loop = self._connected()
        self._settle()  # weights are sent between collections only
        with learner.clock.stage("validate", total=len(seeds)):
            self._send_weights(learner)
            collector = self._collector(self.validation.temperature, learner.clock)
            with self._guarded(collector):
                return loop.run(play_episodes(seeds, self.validation.num_envs, self._maker.held_out, collector))

    def _connected(self) -> tuple[RolloutLearner, LoopThread]:
        if self._learner is None or self._loop is None:
            raise RuntimeError("the data module is not connected to an agent; call connect(agent) first")
        return self._learner, self._loop

    @property
    def _maker(self) -> SessionMaker:
        self._connected()
        assert self._session_maker is not None
        return self._session_maker

    def _collector(self, temperature: float, clock: StageClock, stage: str = "") -> Collector:
        watchdog = self._watchdog(clock, stage)
        return Collector(
            self.interaction, self.engine, self.memory.grows, temperature, self.seed, clock.advance, watchdog
        )

    def _watchdog(self, clock: StageClock, stage: str = "") -> Watchdog:
        return Watchdog(self.stall_seconds, type(self.engine).__name__, lambda: stage or clock.running)

    @contextmanager
    def _guarded(self, collector: Collector) -> Iterator[None]:
        assert collector.watchdog is not None
        with self.engine.collecting(), collector.watchdog.on_guard():
            yield
