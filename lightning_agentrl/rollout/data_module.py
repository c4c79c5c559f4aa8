"""RolloutDataModule, which connects environments, prompts, interaction and engine to Lightning's data hooks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import lightning as L
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.distributed import all_gather, raise_once
from lightning_agentrl.engines import Engine, TransformersEngine
from lightning_agentrl.episodes.agent_program import AgentProgram
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.interaction import Interaction, TurnInteraction
from lightning_agentrl.episodes.seeds import held_out_seeds
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.episodes.sources import EnvConfig, all_sources, memory_for
from lightning_agentrl.episodes.tasks import TaskSet
from lightning_agentrl.prompts.memory import Memory
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import RunDate
from lightning_agentrl.rollout.collector import Collector, Connection, RolloutState, origin_of
from lightning_agentrl.rollout.player import FaultLimits, Player, Watchdog
from lightning_agentrl.rollout.sizes import MINI_BATCH_TURNS, TURNS_PER_ENV, GroupRollout, RolloutSizes, check_arguments
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.rollout.stream import Phase, RolloutStream, begin_next_epoch
from lightning_agentrl.rollout.validation import EpisodeSeeds, ValidationConfig, planned_iterations, validation_due
from lightning_agentrl.stalls import stop_watching, waiting_for, watch
from lightning_agentrl.types import ModelInput
from lightning_agentrl.types.model_input import ImageReader


class RolloutDataModule(L.LightningDataModule):
    """Lightning data module that collects rollouts for training and plays held-out episodes for validation.

    An iteration collects ``num_envs * turns_per_env`` turns. Episodes continue from one iteration to the next, so long
    episodes never delay a step. With ``groups``, an iteration collects whole episodes, several from each start state.
    With ``max_staleness``, the next rollout is collected while the current rollout is trained on.

    Args:
        env: environment or agent program; short form of ``envs`` for a single source.
        num_envs: number of concurrent environments over all ranks.
        turns_per_env: number of turns of each environment per iteration; not with ``groups``.
        mini_batch_turns: number of turns of an optimizer step over all ranks, a divisor of the turns of an iteration.
            Not with ``groups``.
        envs: list of environments, agent programs and sets of one-turn tasks, played according to their shares. Not
            with ``env``.
        groups: sizes of groups of whole episodes, for estimators that compare episodes; None gives iterations a fixed
            number of turns.
        update_epochs: number of passes over each rollout.
        memory: memory, which selects what a prompt shows of past turns. Default: the last turn, or the whole history
            for agent programs.
        prompt: texts and limits of prompts. Default: PromptFormat().
        interaction: turn loop. Default: TurnInteraction().
        engine: sampler of replies. Default: TransformersEngine(), in the trainer's process.
        validation: settings of validation. Default: ValidationConfig().
        faults: limits on faults of environments, after which the run stops. Default: FaultLimits().
        max_staleness: largest number of iterations between sampling a turn and training on this turn. With 0, a rollout
            is collected, then trained on; from 1 on, the next rollout is collected while a rollout is trained on.
        stall_seconds: seconds without progress after which a warning names what the run is waiting for, such as
            environments, the engine, a checkpoint or other ranks; the warning repeats at this interval. 0 disables it.
        seed: seed of episodes, sampling and shuffling. Default: the seed of ``seed_everything``.
    """

    def __init__(
        self,
        env: EnvConfig | AgentProgram | None = None,
        num_envs: int = 32,
        turns_per_env: int = TURNS_PER_ENV,
        mini_batch_turns: int = MINI_BATCH_TURNS,
        envs: list[TaskSet | EnvConfig | AgentProgram] | None = None,
        groups: GroupRollout | None = None,
        update_epochs: int = 1,
        memory: Memory | None = None,
        prompt: PromptFormat | None = None,
        interaction: Interaction | None = None,
        engine: Engine | None = None,
        validation: ValidationConfig | None = None,
        faults: FaultLimits | None = None,
        max_staleness: int = 0,
        stall_seconds: float = 300.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        sources = all_sources(env, envs)
        self.sizes = RolloutSizes(num_envs, turns_per_env, mini_batch_turns, update_epochs, groups)
        self.memory = memory or memory_for(sources)
        self.groups = groups
        self.max_staleness = max_staleness
        self._prompt_given = prompt is not None
        self.prompt = prompt or PromptFormat()
        self.interaction = interaction or TurnInteraction()
        self.engine = engine or TransformersEngine()
        self.validation = validation or ValidationConfig()
        self.faults = faults or FaultLimits()
        self.stall_seconds = stall_seconds
        check_arguments(self, sources, seed)
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        for source in sources:
            if isinstance(source, EnvConfig):
                source.texts = tuple(self.prompt.places)
        self.pool = EnvPool(sources, threads=max(num_envs, self.validation.num_envs))
        self.date = RunDate()
        self.stopping = Stopping()
        self.first_inputs: list[ModelInput] = []  # first prompt of each source, set by `check`
        self.stream: RolloutStream | None = None  # set while a policy is connected
        self._state = RolloutState()  # state from which the next collector continues
        self._broken = False  # whether a run ended with an exception

    def __str__(self) -> str:
        """Describe sources and sizes. Lightning's version would iterate over the loaders, and so collect a rollout."""
        origin = origin_of(self.pool, self.sizes, self.seed)
        return f"{type(self).__name__}({origin}, {self.sizes.num_envs} environments at a time)"

    @property
    def steps_per_iteration(self) -> int:
        """Number of optimizer steps of an iteration, that is of mini-batches in a Lightning epoch."""
        return self.sizes.steps_per_iteration

    @property
    def sessions(self) -> Sequence[Session]:
        """The sessions of this rank in which a training episode is running."""
        return () if self.stream is None else self.stream.collector.sessions

    @property
    def phase(self) -> Phase:
        """Phase of the running iteration: ``critic_warmup`` or ``train``."""
        return "train" if self.stream is None or self.stream.source is None else self.stream.source.phase

    @property
    def preparing(self) -> bool:
        """Whether an iteration has begun and its update has not. Checkpoints then hold the iteration's first state."""
        return self.stream is not None and self.stream.collector.preparing

    @property
    def longest_turn(self) -> int:
        """The largest number of tokens of a prompt and its reply."""
        return self.prompt.max_prompt_tokens + self.interaction.max_reply_tokens

    @property
    def collector(self) -> Collector:
        """Collector of rollouts. A policy must be connected first."""
        return self._connected().collector

    def _connected(self) -> RolloutStream:
        if self.stream is None:
            raise RuntimeError("the data module is not connected to an agent; call connect(agent) first")
        return self.stream

    # Lightning hooks

    def setup(self, stage: str) -> None:
        """Check the parts that need no model: number of processes, the engine's requirements, and environments.

        One environment of each source is created, and later used for episodes.
        """
        watch(self.stall_seconds)
        self.date.now = all_gather(self.date.now)[0]
        with raise_once():
            self.sizes.check_processes(self._rank_and_world[1])
            with waiting_for("the engine to be checked", "setup"):
                self.engine.check()
            self.pool.make_one_of_each()

    def check(
        self, tokenizer: PreTrainedTokenizerBase, context_length: int, image_reader: ImageReader | None = None
    ) -> None:
        """Check that prompts can work. The agent calls this method in its setup, before loading weights.

        Args:
            tokenizer: tokenizer of the policy.
            context_length: number of tokens that all models can read.
            image_reader: the policy's converter of images to model inputs; None if the policy reads text only.

        Raises:
            ValueError: the prompts cannot work; the message names the key to change.
        """
        self.use_model(tokenizer, context_length, image_reader)
        self.first_inputs = self.player.check_prompts(context_length)

    def use_model(
        self, tokenizer: PreTrainedTokenizerBase, context_length: int, image_reader: ImageReader | None = None
    ) -> None:
        """Set the model for which prompts are made; the arguments are those of :meth:`check`."""
        if not self._prompt_given and any(isinstance(source, AgentProgram) for source in self.pool.sources):
            # Agent programs send whole conversations, so their prompts may fill the context up to the reply.
            room = context_length - self.interaction.max_reply_tokens
            self.prompt = replace(self.prompt, max_prompt_tokens=max(room, 1))
        self.player = Player(
            self.pool,
            ChatRenderer(tokenizer, self.prompt, image_reader, self.date),
            self.memory,
            self.interaction,
            self.engine,
            self.seed,
            context_length=context_length,
            faults=self.faults,
            watchdog=Watchdog(self.stall_seconds, type(self.engine).__name__),
        )

    def train_dataloader(self) -> RolloutStream:
        stream = self._connected()
        if self.trainer is not None:
            begin_next_epoch(self.trainer)
        return stream

    def val_dataloader(self) -> EpisodeSeeds:
        """Return the held-out seeds of this rank as one batch."""
        rank, world = self._rank_and_world
        fast = self.trainer is not None and cast(Any, self.trainer).fast_dev_run
        episodes = world if fast else self.validation.episodes
        return EpisodeSeeds(held_out_seeds()[:episodes][rank::world], lambda: self.validation_due)

    @property
    def validation_due(self) -> bool:
        """Whether held-out episodes are due: after certain iterations of a fit, and always outside of a fit."""
        return self.trainer is None or validation_due(self.trainer, self.validation.every, self.steps_per_iteration)

    @property
    def planned_iterations(self) -> int | None:
        """Number of iterations of the run, by ``max_epochs`` or ``max_steps``; None if neither limits it."""
        return planned_iterations(cast(L.Trainer, self.trainer), self.steps_per_iteration)

    def teardown(self, stage: str) -> None:
        """Stop engine, event loop and environments; ``state_dict`` still returns their last state."""
        if self.stream is not None:
            self._state = self.stream.collector.close()
        with waiting_for("environments to close", "teardown"):
            self.pool.close()
        stop_watching()
        self.stream, self._broken = None, False
        self.pool.release_sources()

    def on_exception(self, exception: BaseException) -> None:
        """Cancel a background collection and, after an error, stop all threads; the saved state does not change."""
        stop_watching()
        self._broken = True
        # At a requested end, running replies continue.
        failed = isinstance(exception, Exception)
        if self.stream is not None:
            self.stream.collector.interrupt(stop=failed)
        if failed:
            self.pool.end_threads()
            self.pool.release_sources()

    def state_dict(self) -> dict[str, Any]:
        """Return the running episodes of all ranks as seeds and actions; with groups, also the turns of running groups.

        Before the update of an iteration, this is the state at the iteration's start. After the
        update, this method waits for a background collection and includes its rollout; if the collection fails, the
        state is the state at the collection's start.

        Raises:
            RuntimeError: the call is inside an iteration, whose scored rollout would be lost.
        """
        if self.stream is not None and self.stream.inside_iteration:
            raise RuntimeError(
                "a checkpoint inside an iteration would lose its scored rollout; save at iteration ends: "
                "ModelCheckpoint(save_on_train_epoch_end=True) without every_n_train_steps"
            )
        return (self._state if self.stream is None else self.stream.collector.state()).to_plain()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state until training starts; validation does not use it."""
        if self._broken or (self.stream is not None and self.stream.collector.begun):
            self.teardown("fit")  # the last run was interrupted
        self._state = RolloutState.from_plain(state_dict)
        if self.stream is not None:  # sharded strategies load checkpoints after the agent was connected
            self.stream.collector.load(self._state)

    @property
    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    # Called by the agent

    def connect(self, connection: Connection) -> None:
        """Start the engine with a policy, and create the collector. Do nothing if the same policy is already connected.

        Args:
            connection: interface to the agent, whose prompts were checked.
        """
        policy = connection.handle.policy
        if self.stream is not None or self._broken:
            if self.stream is not None and self.collector.policy is policy and not self._broken:
                return
            # After an interrupted run, continue from the start of the interrupted collection.
            self.teardown("fit")
        if self._state.policy not in (None, policy):
            self._state = RolloutState()  # the old state belongs to another agent
        self.pool.start_sources(next(policy.parameters()).device, self.date)
        collector = Collector(
            self.player, connection, self.sizes, self._state, self.stopping, self.max_staleness, *self._rank_and_world
        )
        self.stream = RolloutStream(collector, connection.prepare, self.sizes, self.seed)
