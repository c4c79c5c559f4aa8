"""Collector of rollouts, which owns engine, sessions, event loop and training environments of one rank."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.distributed import all_gather, raise_once
from lightning_agentrl.engines import PolicyHandle
from lightning_agentrl.episodes.env_pool import EnvPool
from lightning_agentrl.episodes.env_worker import close_all
from lightning_agentrl.episodes.recorder import Recorder
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.metrics.episodes import EpisodeResult
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.rollout.ahead import Background, pooled
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.forks import Forks
from lightning_agentrl.rollout.groups import WholeGroups
from lightning_agentrl.rollout.player import Player, play_parts
from lightning_agentrl.rollout.sizes import RolloutSizes
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.rollout.validation import ValidationConfig, WholeEpisode, play_episodes
from lightning_agentrl.stalls import waiting_for
from lightning_agentrl.types import ForkPlan, Rollout, rollout_from_plain
from lightning_agentrl.types.plain import with_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A rollout with advantages and returns, and the metrics to log with its first optimizer step."""

    rollout: Rollout
    metrics: dict[str, float]


@dataclass(frozen=True)
class Connection:
    """Interface of an agent to the collection of rollouts.

    Args:
        handle: access to the policy.
        prepare: function that scores a rollout and estimates its advantages and returns.
        policy_version: function that returns the number of optimizer steps so far, including skipped ones.
        held_steps: function that returns the range of steps that do not change the policy: the critic's warm-up.
        clock: stage clock, which times stages and shows their progress.
        temperature: temperature of sampling in training.
        after_sync: function that is called before each rollout, after the engine's weights were updated.
        greedy_baseline: whether to play one more episode of each group with temperature 0.
        forks: plan of the states whose values are measured by forked episodes; None for no forks.
    """

    handle: PolicyHandle
    prepare: Callable[[Rollout], Prepared]
    policy_version: Callable[[], int]
    held_steps: Callable[[], range]
    clock: StageClock
    temperature: float = 1.0
    after_sync: Callable[[], None] = lambda: None
    greedy_baseline: bool = False
    forks: ForkPlan | None = None


@dataclass
class RolloutState:
    """State of the training environments of one rank, from which the collection continues."""

    sessions: dict[int, Any] = field(default_factory=dict)  # running episodes by environment
    iteration: int = 0  # number of iterations that have begun
    collected: int = 0  # number of rollouts collected
    origin: str = ""  # description of the sources, group sizes and seed
    ahead: Rollout | None = None  # rollout that was collected but not trained on
    lost: Sequence[bool] = ()  # whether each of the last episodes of all ranks was lost
    policy: LanguageModel | None = None  # policy that played here; not in checkpoints

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> RolloutState:
        """Restore the state from the result of :meth:`to_plain`, which holds the sessions of all ranks."""
        ahead = state["ahead"]
        return cls(**{**state, "ahead": None if ahead is None else rollout_from_plain(ahead)})

    def to_plain(self) -> dict[str, Any]:
        """Serialize the state of all ranks to plain types and tensors. Every rank must call this method."""
        return {
            "sessions": {i: state for part in all_gather(with_tensors(self.sessions)) for i, state in part.items()},
            "iteration": self.iteration,
            "collected": self.collected,
            "origin": self.origin,
            "ahead": pooled(self.ahead),
            "lost": list(self.lost),
        }


class FixedTurns:
    """Rollouts with the same fixed number of turns of each environment; episodes continue in the next rollout.

    Args:
        player: player of the sessions.
        sessions: sessions, one for each environment.
        turns_per_env: number of turns of each session per rollout.
        collected: number of rollouts that were collected before.
    """

    def __init__(self, player: Player, sessions: Sequence[Session], turns_per_env: int, collected: int = 0) -> None:
        self.player = player
        self.sessions = sessions
        self.turns_per_env = turns_per_env
        self.collected = collected

    @property
    def total(self) -> int:
        """Number of turns of a rollout on this rank."""
        return len(self.sessions) * self.turns_per_env

    async def collect(self, advance: Callable[[], None] = lambda: None) -> Rollout:
        """Play ``turns_per_env`` turns of all sessions concurrently, and return them as a rollout.

        Args:
            advance: function that is called after each turn.
        """
        recorders = [Recorder(self.turns_per_env, self.player.memory.grows, advance) for _ in self.sessions]
        plays = [partial(self.player.play, *pair) for pair in zip(self.sessions, recorders, strict=True)]
        await play_parts(plays, len(plays), self.player.engine)
        self.collected += 1
        return Rollout.from_samples([sample for recorder in recorders for sample in recorder.samples()])

    def state_dict(self) -> dict[int, Any]:
        """Return the state of each environment's running episode, by the environment's index over all ranks."""
        return {session.index: session.state_dict() for session in self.sessions}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Continue the episodes of this rank from their saved states; episodes of other ranks are ignored."""
        for session in self.sessions:
            if session.index in state:
                session.load_state_dict(state[session.index])


def endless_session(player: Player, env: int, pictures: bool = False) -> Session:
    """Return a session of the environment with index ``env`` that plays one episode after another."""
    return player.session(
        player.pool.kind(env), env, lambda episode: derive_seed(player.seed, env, episode), pictures=pictures
    )


def origin_of(pool: EnvPool, sizes: RolloutSizes, seed: int) -> str:
    """Return a description of the sources, group sizes and seed, which determine the episodes of a run."""
    groups = "" if sizes.groups is None else f", {sizes.groups.per_rollout} groups of {sizes.groups.size}"
    return f"{pool.label}{groups}, seed {seed}"


class Collector:
    """Collector of rollouts from persistent environments, which also plays held-out episodes between two rollouts.

    The environments are created for the first rollout, and continue the episodes of the saved state. While an iteration
    prepares its update, or a rollout is collected in the background, ``state`` returns the state before this work.

    Args:
        player: player of the sessions; its engine is started here.
        connection: interface to the agent.
        sizes: sizes of rollouts.
        state: state from which the episodes continue.
        stopping: requests to end the run.
        max_staleness: largest number of iterations between sampling a turn and training on this turn.
        rank: rank of this process.
        world: number of ranks.
    """

    def __init__(
        self,
        player: Player,
        connection: Connection,
        sizes: RolloutSizes,
        state: RolloutState,
        stopping: Stopping,
        max_staleness: int,
        rank: int,
        world: int,
    ) -> None:
        self.player = replace(player, temperature=connection.temperature)
        self.connection, self.clock, self.engine = connection, connection.clock, player.engine
        self.sizes, self.stopping = sizes, stopping
        self.rank, self.world = rank, world
        self.max_staleness = max_staleness
        self.origin = origin_of(player.pool, sizes, player.seed)
        forks = connection.forks
        self.forks = None if forks is None else Forks(forks, self.player, sizes.at_a_time(world), self.clock)
        self.load(state)
        with waiting_for(f"{type(self.engine).__name__} to start", "setup"):
            self.engine.start(connection.handle)
        self.loop = LoopThread()

    def load(self, state: RolloutState) -> None:
        """Set the state from which the first rollout continues."""
        self._saved = state
        # A saved rollout that is too old for this run is dropped with a warning.
        ahead = self.max_staleness > 0 or state.ahead is not None
        self.ahead = Background(self.max_staleness, self.clock) if ahead else None
        self.iteration, self.lost = state.iteration, state.lost
        self._episodes: FixedTurns | WholeGroups | None = None  # set when the first rollout is needed
        self._at_beginning: RolloutState | None = None  # state at the start of an iteration, until its update
        self._before_ahead: RolloutState | None = None  # state before a running or failed background collection

    # Rollouts

    @property
    def policy(self) -> LanguageModel:
        """The policy that samples the replies."""
        return self.connection.handle.policy

    @property
    def begun(self) -> bool:
        """Whether the training environments were created."""
        return self._episodes is not None

    @property
    def sessions(self) -> Sequence[Session]:
        """The sessions in which a training episode is running."""
        return () if self._episodes is None else self._episodes.sessions

    @property
    def preparing(self) -> bool:
        """Whether an iteration has begun and its update has not."""
        return self._at_beginning is not None

    @contextmanager
    def prepare_update(self) -> Iterator[None]:
        """Begin an iteration. Inside the context, ``state`` is the state at its start, and the run may stop."""
        self._begin()
        self._at_beginning = self.state()
        self.stopping.agree()
        yield
        self._at_beginning = None
        self.iteration += 1

    def collect(self) -> Rollout:
        """Return the next rollout, which was collected in the background or is collected now with the current weights.

        Raises:
            EnvError: environments failed more often than allowed; raised on all ranks.
        """
        rollout, beside, total = None, None, self._begin().total
        version = self.connection.policy_version()
        if self.ahead is not None:
            with self.stopping.together(alone=True):
                self.settle()
                self.ahead.raise_failure()
            rollout = self.ahead.take(version, self.sizes.steps_per_iteration, self.connection.held_steps())
            beside = None if rollout is None else self.ahead.seconds
        if rollout is None:
            with self.clock.stage("collect", total=total):
                with self.stopping.together():
                    self._sync()
                with self.stopping.together(alone=True):
                    rollout = self._run(self._play(self.clock.advance))
        with raise_once():
            self.lost = self.player.faults.count(self.lost, rollout)
        self.clock.count("collect", turns=len(rollout.turns), tokens=rollout.tokens, beside=beside)
        return rollout

    def begin_next(self) -> None:
        """Start collecting the next rollout in the background, unless ``max_staleness`` is 0."""
        if self.ahead is None or self.max_staleness == 0:
            return
        total = self._begin().total
        with self.clock.stage("collect"), self.stopping.together():
            self._sync()
        self._before_ahead = self._now()
        self.ahead.begin(self._play, total, self.loop, self.player.watchdog)

    def settle(self) -> None:
        """Wait for a background collection."""
        if self.ahead is not None and self.ahead.settle():
            self._before_ahead = None

    def _begin(self) -> FixedTurns | WholeGroups:
        """Create the environments of this rank at the first call, and continue their saved episodes.

        Raises:
            ValueError: the saved episodes belong to other environments; the message names the keys.
        """
        if self._episodes is not None:
            return self._episodes
        saved = self._saved
        if (saved.sessions or saved.collected) and saved.origin != self.origin:
            raise ValueError(
                f"the checkpoint's environments are {saved.origin}; this run has {self.origin}, so their episodes "
                "cannot continue: set the same data.init_args.env (or envs) and seed, or start without --ckpt_path"
            )
        with raise_once(), waiting_for("environments to be created and continue their episodes", "collect"):
            episodes = self._make_episodes()
            episodes.load_state_dict(saved.sessions)
        if saved.ahead is not None and self.ahead is not None:
            turns = self.sizes.turns_per_rollout if self.sizes.groups is None else None
            own, envs = self.sizes.own_envs(self.rank, self.world), self.sizes.envs_per_rollout
            self.ahead.adopt(saved.ahead, own, envs, turns, self.forks is not None)
        self._episodes = episodes
        return episodes

    def _make_episodes(self) -> FixedTurns | WholeGroups:
        sizes, rank, world, collected = self.sizes, self.rank, self.world, self._saved.collected
        player = self.player if self.forks is None else self.forks.recording
        if sizes.groups is None:
            sessions = [endless_session(player, env, pictures=True) for env in sizes.own_envs(rank, world)]
            return FixedTurns(player, sessions, sizes.turns_per_env, collected)
        at_a_time = sizes.at_a_time(world)
        greedy = self.connection.greedy_baseline
        return WholeGroups(sizes.groups, player, rank, world, at_a_time, greedy, collected)

    async def _play(self, advance: Callable[[], None]) -> Rollout:
        episodes = self._begin()
        rollout = await episodes.collect(advance)
        return rollout if self.forks is None else await self.forks.add_values(rollout, episodes.sessions)

    # Engine and event loop

    def _sync(self, before_rollout: bool = True) -> None:
        """Update the engine's weights."""
        what = f"{type(self.engine).__name__} to update its weights"
        with waiting_for(what, lambda: self.clock.running):
            with self.clock.part("sync"):
                self.engine.sync(self.connection.policy_version())
            if before_rollout:
                self.connection.after_sync()

    def _run(self, playing: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop to its end, unless the run is requested to end."""
        with self.engine.collecting(), self.player.watchdog.on_guard(lambda: self.clock.running):
            return self.loop.run(playing, self.stopping.look)

    def play_held_out(
        self, seeds: Sequence[int], config: ValidationConfig, watched: int = 0
    ) -> tuple[list[EpisodeResult], list[WholeEpisode]]:
        """Play one whole episode per held-out seed with the current weights, in separate environments.

        Args:
            seeds: held-out seeds.
            config: validation settings, for temperature and number of concurrent environments.
            watched: number of episodes, for the first seeds of the list, to return in full with pictures.

        Returns:
            Results in the order of the seeds, and the watched episodes; see :func:`play_episodes`.
        """
        player = replace(self.player, temperature=config.temperature)
        self.settle()  # the weights must not change during a collection
        try:
            with self.clock.stage("validate", total=len(seeds)):
                with self.stopping.together():
                    self._sync(before_rollout=False)
                with self.stopping.together(alone=True):
                    playing = play_episodes(seeds, player, config.num_envs, self.clock.advance, watched)
                    results, episodes = self._run(playing)
                    return [one for sides in results for one in sides], episodes
        finally:
            player.pool.close_held_out()

    # State and end

    def state(self) -> RolloutState:
        """Return the state of this rank for a checkpoint; after an update, wait for a background collection first."""
        if self._at_beginning is None:
            self.settle()
        return self._at_beginning or self._before_ahead or self._now()

    def _now(self) -> RolloutState:
        if self._episodes is None:
            return replace(self._saved, iteration=self.iteration, lost=self.lost)
        sessions, collected = self._episodes.state_dict(), self._episodes.collected
        ready = None if self.ahead is None else self.ahead.ready
        return RolloutState(sessions, self.iteration, collected, self.origin, ready, self.lost, self.policy)

    def interrupt(self, stop: bool) -> None:
        """Cancel a background collection; ``state`` remains the state at the collection's start.

        Args:
            stop: whether to stop the engine and the event loop, without waiting for running calls of environments.
        """
        if self.ahead is not None:
            self.ahead.cancel()
        if stop:
            self.engine.stop()
            self.loop.stop()

    def close(self) -> RolloutState:
        """Stop engine, event loop and environments; return the state from which the episodes continue."""
        if self._at_beginning is None:
            self.settle()
        with waiting_for(f"{type(self.engine).__name__} to stop", "teardown"):
            self.interrupt(stop=True)
        with waiting_for("the last calls of environments, and for them to close", "teardown"):
            self.player.pool.close()
        state = self.state()
        if self.ahead is not None and (error := self.ahead.unraised):
            rank_zero_warn(f"background collection failed after training ended: {type(error).__name__}: {error}")
        with waiting_for("environments to close", "teardown"):
            close_all([session.worker for session in self.sessions])
        self._episodes = None
        return state
