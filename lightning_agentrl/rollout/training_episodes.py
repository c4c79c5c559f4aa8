"""The training episodes of one rank: made when they are first needed, collected from, and kept for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.distributed import raise_once
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.rollout.background import Background
from lightning_agentrl.rollout.collection import Collection
from lightning_agentrl.rollout.connection import Connection
from lightning_agentrl.rollout.fault_limits import LostEpisodes
from lightning_agentrl.rollout.fixed_turns import FixedTurns, endless_session
from lightning_agentrl.rollout.forks import Forks
from lightning_agentrl.rollout.groups import WholeGroups
from lightning_agentrl.rollout.session_maker import SessionMaker
from lightning_agentrl.rollout.sizes import RolloutSizes
from lightning_agentrl.rollout.state import RolloutState
from lightning_agentrl.rollout.stopping import Stopping
from lightning_agentrl.stalls import waiting_for
from lightning_agentrl.types import Rollout


class TrainingEpisodes:
    """Episodes that go on from one rollout to the next, and from one run of their data module to the next.

    They are at rest, as a state from which they go on, until somebody needs them; then their environments run, until
    :meth:`end`. While an iteration prepares its update, a checkpoint holds them as they were at its beginning.

    Args:
        sizes: of rollouts.
        max_staleness: most iterations by which the weights that sampled a turn may be behind those that it trains.
        share: largest share of episodes that may be lost to faults.
        origin: what the episodes follow from, in words.
        stopping: whether the run is asked to end.
    """

    def __init__(self, sizes: RolloutSizes, max_staleness: int, share: float, origin: str, stopping: Stopping) -> None:
        self.sizes = sizes
        self.share = share
        self.origin = origin
        self.stopping = stopping
        self._rest = RolloutState()  # where they go on, and rollouts collected so far
        self._running: Collection | None = None
        self._beginning: RolloutState | None = None  # of the iteration that prepares its update
        self._ahead = Background(max_staleness)
        self._lost = LostEpisodes(share)
        self._policy: LanguageModel | None = None  # that has played them

    @property
    def running(self) -> bool:
        """Whether their environments run."""
        return self._running is not None

    @property
    def sessions(self) -> Sequence[Session]:
        """Those in which an episode is running."""
        return () if self._running is None else self._running.sessions

    @property
    def preparing(self) -> bool:
        """Whether an iteration has begun and not come to its update."""
        return self._beginning is not None

    @property
    def interrupted(self) -> bool:
        """Whether a run has ended where they cannot simply go on."""
        return self._ahead.cancelled or self.preparing

    @property
    def iteration(self) -> int:
        """Iterations that were begun when they came to rest."""
        return self._rest.iteration

    def load(self, state: RolloutState) -> None:
        """Go on from the state of a checkpoint, when they are needed."""
        self._rest, self._policy = state, None
        self._lost = LostEpisodes(self.share, state.lost)

    def give_to(self, policy: LanguageModel) -> None:
        """Let a policy play them from now on; another one than before starts afresh."""
        if self._policy is not None and self._policy is not policy:
            self.load(RolloutState())

    def state(self, iteration: int) -> RolloutState:
        """Return the state of this rank for a checkpoint, after so many iterations were begun."""
        if self._beginning is not None:
            return self._beginning
        lost = self._lost.entries
        if self._running is None:
            return replace(self._rest, iteration=iteration, lost=lost)
        before = self._ahead.before
        own = self._running.state_dict() if before is None else before  # if the collection failed, it is begun again
        return RolloutState(own, iteration, self._rest.collected, self.origin, self._ahead.ready, lost)

    @contextmanager
    def keeping_the_beginning(self, connection: Connection, iteration: int) -> Iterator[None]:
        """Let checkpoints hold the state before this block until it is through."""
        self._begin(connection)
        self.settle()
        self._beginning = self.state(iteration)
        self.stopping.agree()
        yield
        self._beginning = None

    def collect(self, connection: Connection) -> Rollout:
        """Return the next rollout: the one begun before, or one sampled with the current weights.

        Raises:
            EnvError: environments fail more often than is allowed. All ranks stop.
        """
        with self.stopping.together(alone=True):
            self._begin(connection)
            self.settle()
            self._ahead.raise_failure()
        ready = self._ahead.take(connection.policy_version(), self.sizes.steps_per_iteration, connection.held_steps())
        rollout = self._collect_now(connection) if ready is None else ready
        with raise_once():
            self._lost.add(rollout)
        tokens = sum(len(sample.ids) for sample in rollout.samples)
        beside = None if ready is None else self._ahead.seconds
        connection.clock.count("collect", turns=len(rollout.turns), tokens=tokens, beside=beside)
        return rollout

    def _collect_now(self, connection: Connection) -> Rollout:
        episodes = self._begin(connection)
        with connection.clock.stage("collect", total=episodes.total):
            with self.stopping.together():
                connection.send_before_rollout()
            player = connection.player(connection.temperature)
            with self.stopping.together(alone=True):
                rollout = connection.play(player, episodes.collect(player), self.stopping.look)
        self._rest.collected += 1
        return rollout

    def begin_next(self, connection: Connection) -> None:
        """Start collecting the next rollout with the current weights, and return at once."""
        episodes = self._begin(connection)
        with connection.clock.stage("collect"), self.stopping.together():
            connection.send_before_rollout()
        player = connection.player(connection.temperature, "collect")
        self._ahead.begin(episodes, player, connection.loop, connection.clock)

    def settle(self) -> None:
        """Wait for a collection in the background."""
        if self._ahead.settle():
            self._rest.collected += 1

    def cancel(self) -> None:
        """End a collection in the background; the episodes stay as they were when it began."""
        self._ahead.cancel()

    def rest(self, iteration: int) -> None:
        """Keep the state from which they go on, after so many iterations were begun; no environment moves any more."""
        self._rest, self._beginning = self.state(iteration), None
        if error := self._ahead.unraised:
            rank_zero_warn(f"background collection failed after training ended: {type(error).__name__}: {error}")
        self._ahead = Background(self._ahead.max_staleness)

    def close(self) -> None:
        """Close their environments."""
        if self._running is not None:
            self._running.close()
        self._running = None

    def _begin(self, connection: Connection) -> Collection:
        """Make the environments of this rank when they are first needed, and continue their saved episodes."""
        if self._running is not None:
            return self._running
        self._rest.check_origin(self.origin)
        with waiting_for("environments to be made and continue their episodes", "collect"):
            episodes = self._made(connection)
            episodes.load_state_dict(self._rest.sessions)
        if self._rest.ahead is not None:
            turns = self.sizes.turns_per_rollout if self.sizes.groups is None else None
            own, envs = self.sizes.own_envs(*connection.rank_and_world), self.sizes.envs_per_rollout
            self._ahead.adopt(self._rest.ahead, own, envs, turns, connection.forks is not None)
            self._rest.ahead = None
        self._running, self._policy = episodes, connection.handle.policy
        return episodes

    def _made(self, connection: Connection) -> Collection:
        plan = connection.forks
        if plan is None:
            return self._unforked(connection, connection.make)
        make = replace(connection.make, moments={})
        at_a_time = self.sizes.at_a_time(connection.rank_and_world[1])
        return Forks(self._unforked(connection, make), plan, make, at_a_time, connection.clock)

    def _unforked(self, connection: Connection, make: SessionMaker) -> Collection:
        rank, world = connection.rank_and_world
        if self.sizes.groups is None:
            sessions = [endless_session(make, env, pictures=True) for env in self.sizes.own_envs(rank, world)]
            return FixedTurns(sessions, self.sizes.turns_per_env)
        return WholeGroups(
            self.sizes.groups,
            make,
            rank,
            world,
            at_a_time=self.sizes.at_a_time(world),
            greedy=connection.greedy_baseline,
            collected=self._rest.collected,
        )
