"""Background collection of the next rollout while the current one is trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.distributed import all_gather, max_over_ranks
from lightning_agentrl.metrics.rollout import staleness
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.rollout.event_loop import LoopThread, Running
from lightning_agentrl.rollout.player import Watchdog
from lightning_agentrl.types import Rollout, rollout_from_plain, rollout_to_plain

Play = Callable[[Callable[[], None]], Coroutine[Any, Any, Rollout]]  # function (progress callback) -> coroutine


class Background:
    """Background collection of at most one rollout. From ``begin`` to ``settle`` it owns the environments.

    Args:
        max_staleness: largest age of turns when they are trained on, in iterations.
        clock: stage clock, which shows the progress while the main thread waits for the collection.
    """

    def __init__(self, max_staleness: int, clock: StageClock) -> None:
        self.max_staleness = max_staleness
        self.ready: Rollout | None = None
        self.seconds = 0.0  # duration of the last collection; 0 for a rollout from a checkpoint
        self._clock = clock
        self._running: Running[Rollout] | None = None
        self._total = self._done = 0
        # Whether the main thread waits for the collection, and whether the collection's error was raised.
        self._awaited = self._raised = False

    def begin(self, play: Play, total: int, loop: LoopThread, watchdog: Watchdog) -> None:
        """Start a collection in the background.

        Args:
            play: function that returns the coroutine of the collection.
            total: number of times that the coroutine reports progress.
            loop: event loop in which the coroutine runs.
            watchdog: watchdog that warns if the coroutine is stuck.
        """
        self._total, self._done = total, 0
        self._awaited = self._raised = False
        self._running = loop.begin(self._collect(play, watchdog))

    def settle(self) -> bool:
        """Wait for a running collection; return True if it succeeded, False if it failed or no collection was running.

        After a failure, call ``raise_failure`` when the rollout is needed.
        """
        running = self._running
        if running is None or running.failed():
            return False
        with self._clock.stage("collect", self._total, self._done):
            self._awaited = True
            running.wait()
        if running.failed():
            return False
        self.ready, self._running = running.result(), None
        return True

    def adopt(self, rollout: Rollout, own_envs: Sequence[int], num_envs: int, turns: int | None, forks: bool) -> None:
        """Restore this rank's part of a rollout from a checkpoint, or drop it with a warning if the sizes differ.

        Args:
            rollout: rollout of all ranks that was collected ahead.
            own_envs: indices of this rank's environments.
            num_envs: number of environments of a rollout in this run.
            turns: number of turns of a rollout in this run; None if the number is not fixed.
            forks: whether this run forks the states of its rollouts.
        """
        if not _dropped(misfit(rollout, num_envs, turns, forks)):
            self.ready, self.seconds = rows_of(rollout, own_envs), 0.0

    def take(self, policy_version: int, steps_per_iteration: int, held_steps: range) -> Rollout | None:
        """Return the collected rollout, or None if none exists or it is too old. Every rank must call this method.

        Args:
            policy_version: version of the weights that are trained next.
            steps_per_iteration: number of versions per iteration.
            held_steps: versions that do not change the policy, such as steps of the critic's warm-up.
        """
        taken, self.ready = self.ready, None
        if taken is None:
            return None
        ages = staleness(taken.turns, policy_version, steps_per_iteration, held_steps)
        oldest = max_over_ranks(max(ages, default=0.0))
        if oldest <= self.max_staleness:
            return taken
        _dropped(
            f"has turns that are {oldest:g} iterations old, and data.init_args.max_staleness is {self.max_staleness}"
        )
        return None

    def raise_failure(self) -> None:
        """Raise the error of the collection, if the collection failed.

        Raises:
            Exception: error of an environment or of the engine.
        """
        if self._running is not None:
            self._raised = True
            self._running.result()

    def cancel(self) -> None:
        """Cancel a running collection."""
        if self._running is not None:
            self._running.cancel()

    @property
    def unraised(self) -> BaseException | None:
        """The error of a failed collection whose rollout was not needed."""
        return None if self._running is None or self._raised else self._running.error

    async def _collect(self, play: Play, watchdog: Watchdog) -> Rollout:
        started = time.perf_counter()
        with watchdog.on_guard(lambda: "collect"):
            rollout = await play(self._advance)
        self.seconds = time.perf_counter() - started
        return rollout

    def _advance(self) -> None:
        self._done += 1
        if self._awaited:
            self._clock.advance()


def _dropped(reason: str) -> bool:
    """Warn that a rollout is dropped unless the reason is empty; return whether a reason was given."""
    if reason:
        rank_zero_warn(f"the rollout that was collected ahead {reason}; it is dropped, and a new one is collected")
    return bool(reason)


def misfit(rollout: Rollout, num_envs: int, turns: int | None, forks: bool = False) -> str:
    """Return why a rollout from a checkpoint does not fit this run; empty if the rollout fits.

    Args:
        rollout: rollout of all ranks.
        num_envs: number of environments of a rollout in this run.
        turns: number of turns of a rollout in this run; None if the number is not fixed.
        forks: whether this run forks the states of its rollouts.
    """
    if forks and rollout.state_values is None:
        return "has no forks, which this run needs"
    envs = {turn.env for turn in rollout.turns}
    if turns is None and envs <= set(range(num_envs)):  # with groups, episodes may be missing
        return ""
    if turns == len(rollout.turns) and envs == set(range(num_envs)):
        return ""
    return f"has {len(rollout.turns)} turns of {len(envs)} environments, unlike the rollouts of this run"


def pooled(rollout: Rollout | None) -> dict[str, Any] | None:
    """Gather a rollout from all ranks without duplicate rows, as plain types. Every rank must call this function."""
    plain = all_gather(None if rollout is None else rollout_to_plain(rollout))
    parts = [rollout_from_plain(part) for part in plain if part is not None]
    if not parts:
        return None
    every = Rollout.concat(parts)
    rows: dict[tuple[int, int, int], int] = {}
    for row, sample in enumerate(every.samples):
        first = sample.turns[0]
        rows.setdefault((first.env, first.episode, first.index), row)
    return rollout_to_plain(every.select(list(rows.values())))


def rows_of(rollout: Rollout, envs: Sequence[int]) -> Rollout:
    """Return the part of a rollout that was played in the environments with the indices ``envs``."""
    own = set(envs)
    return rollout.select([i for i, sample in enumerate(rollout.samples) if sample.turns[0].env in own])
