"""RolloutDataModule: environments, prompts, interaction and engine behind Lightning's data hooks."""

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
    """Rollouts for training, and held-out episodes for validation.

    An iteration collects ``num_envs * turns_per_env`` turns. Environments live on from one iteration to the next, so
    long episodes never hold up a step. With ``groups`` it collects whole episodes instead, several from each start.
    With ``max_staleness`` it collects the next rollout while the current one is trained on.

    Args:
        env: the environment, as gymnasium.make takes it, or an agent program; the short form of ``envs`` for one alone.
        num_envs: environments that play at a time, over all ranks.
        turns_per_env: turns of each environment per iteration; not with ``groups``.
        mini_batch_turns: turns of one optimizer step over all ranks; divides the turns of an iteration. Not with
            ``groups``.
        envs: everything that is played, each by its share: environments, and sets of one-turn tasks. Not with ``env``.
        groups: collect whole groups of episodes, for estimators that compare episodes; None: a fixed number of turns.
        update_epochs: passes over each rollout.
        memory: what of the past a prompt shows; the last turn by default.
        prompt: how prompts are worded; the defaults of PromptFormat when not given.
        interaction: the turn loop; TurnInteraction when not given.
        engine: what samples the replies; transformers in process by default.
        validation: what validation plays; the defaults of ValidationConfig when not given.
        faults: when faults of environments stop the run; the defaults of FaultLimits when not given.
        max_staleness: most iterations by which the weights that sampled a turn may be behind those that it trains. 0:
            collect, then train. From 1 on: collect the next rollout while this one trains.
        stall_seconds: seconds without progress after which a warning names what is waited for, such as environments,
            the engine, a checkpoint or other ranks; repeated at this interval. 0: never.
        seed: of episodes, sampling and shuffling; the seed of ``seed_everything`` when not given.
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
        self.first_inputs: list[ModelInput] = []  # a first prompt of each source, once checked
        self.stream: RolloutStream | None = None  # while a policy is connected
        self._state = RolloutState()  # from which the next collector continues
        self._broken = False  # an exception has ended a run

    def __str__(self) -> str:
        """Lightning's would go through the loaders, and so collect a rollout."""
        origin = origin_of(self.pool, self.sizes, self.seed)
        return f"{type(self).__name__}({origin}, {self.sizes.num_envs} environments at a time)"

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of an iteration, which are the mini-batches of a Lightning epoch."""
        return self.sizes.steps_per_iteration

    @property
    def sessions(self) -> Sequence[Session]:
        """The training environments of this rank in which an episode is running."""
        return () if self.stream is None else self.stream.collector.sessions

    @property
    def phase(self) -> Phase:
        """Phase of the running iteration: ``critic_warmup`` or ``train``."""
        return "train" if self.stream is None or self.stream.source is None else self.stream.source.phase

    @property
    def preparing(self) -> bool:
        """Whether an iteration has begun and its update has not. A checkpoint then holds its beginning."""
        return self.stream is not None and self.stream.collector.preparing

    @property
    def longest_turn(self) -> int:
        """The most tokens of a prompt with its reply."""
        return self.prompt.max_prompt_tokens + self.interaction.max_reply_tokens

    @property
    def collector(self) -> Collector:
        """Collector of the rollouts; needs a connected policy."""
        return self._connected().collector

    def _connected(self) -> RolloutStream:
        if self.stream is None:
            raise RuntimeError("the data module is not connected to an agent; call connect(agent) first")
        return self.stream

    # Lightning hooks

    def setup(self, stage: str) -> None:
        """Refuse what can be checked without a model: processes, the engine's packages, and environments.

        One environment of each source is made, and kept as the first to be played.
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
        """Refuse prompts that cannot work. The agent calls it in its own setup, before it reads weights.

        Args:
            tokenizer: of the policy.
            context_length: tokens that all models can read.
            image_reader: what the policy makes of images; None: it reads text only.

        Raises:
            ValueError: one sentence with the key to change.
        """
        self.use_model(tokenizer, context_length, image_reader)
        self.first_inputs = self.player.check_prompts(context_length)

    def use_model(
        self, tokenizer: PreTrainedTokenizerBase, context_length: int, image_reader: ImageReader | None = None
    ) -> None:
        """Make prompts for a model from now on; the arguments are those of :meth:`check`."""
        if not self._prompt_given and any(isinstance(source, AgentProgram) for source in self.pool.sources):
            room = context_length - self.interaction.max_reply_tokens  # agents bring whole conversations
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
        """Return the held-out seeds that this rank plays, as one batch."""
        rank, world = self._rank_and_world
        fast = self.trainer is not None and cast(Any, self.trainer).fast_dev_run
        episodes = world if fast else self.validation.episodes
        return EpisodeSeeds(held_out_seeds()[:episodes][rank::world], lambda: self.validation_due)

    @property
    def validation_due(self) -> bool:
        """Whether to play held-out episodes now: after some iterations of a fit, and always outside a fit."""
        return self.trainer is None or validation_due(self.trainer, self.validation.every, self.steps_per_iteration)

    @property
    def planned_iterations(self) -> int | None:
        """Iterations of the whole run, by ``max_epochs`` or ``max_steps``, whichever ends it; None without an end."""
        return planned_iterations(cast(L.Trainer, self.trainer), self.steps_per_iteration)

    def teardown(self, stage: str) -> None:
        """Stop engine, event loop and environments; ``state_dict`` still gives the episodes as they were."""
        if self.stream is not None:
            self._state = self.stream.collector.close()
        with waiting_for("environments to close", "teardown"):
            self.pool.close()
        stop_watching()
        self.stream, self._broken = None, False
        self.pool.release_sources()

    def on_exception(self, exception: BaseException) -> None:
        """End the collection in the background, and after an error all threads; episodes stay as they were."""
        stop_watching()
        self._broken = True
        failed = isinstance(exception, Exception)  # else the run was asked to end, and running replies are left alone
        if self.stream is not None:
            self.stream.collector.interrupt(stop=failed)
        if failed:
            self.pool.end_threads()
            self.pool.release_sources()

    def state_dict(self) -> dict[str, Any]:
        """Return the running episodes of every rank as seeds and actions; with groups, also the turns of those begun.

        Before the update of an iteration, this is what the iteration began with. After it, a collection in the
        background is waited for, and its rollout saved. If it fails, the environments are saved as they were when it
        began.

        Raises:
            RuntimeError: inside an iteration, whose scored rollout would be lost.
        """
        if self.stream is not None and self.stream.inside_iteration:
            raise RuntimeError(
                "a checkpoint inside an iteration would lose its scored rollout; save at iteration ends: "
                "ModelCheckpoint(save_on_train_epoch_end=True) without every_n_train_steps"
            )
        return (self._state if self.stream is None else self.stream.collector.state()).to_plain()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts; validation needs none of it."""
        if self._broken or (self.stream is not None and self.stream.collector.begun):
            self.teardown("fit")  # the last run did not come to its end
        self._state = RolloutState.from_plain(state_dict)
        if self.stream is not None:  # sharded strategies load after the agent was connected
            self.stream.collector.load(self._state)

    @property
    def _rank_and_world(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    # What the agent calls

    def connect(self, connection: Connection) -> None:
        """Start the engine with a policy whose model was checked, and collect with it; harmless if it was done before.

        Args:
            connection: to the agent.
        """
        policy = connection.handle.policy
        if self.stream is not None or self._broken:
            if self.stream is not None and self.collector.policy is policy and not self._broken:
                return
            self.teardown("fit")  # the last run did not come to its end; continue from where its collection began
        if self._state.policy not in (None, policy):
            self._state = RolloutState()  # of another agent
        self.pool.start_sources(next(policy.parameters()).device, self.date)
        collector = Collector(
            self.player, connection, self.sizes, self._state, self.stopping, self.max_staleness, *self._rank_and_world
        )
        self.stream = RolloutStream(collector, connection.prepare, self.sizes, self.seed)
