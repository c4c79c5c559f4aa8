"""The rollout after the one that is trained on: collected in the background, and kept until it is needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.rollout.collection import Collection
from lightning_agentrl.rollout.event_loop import LoopThread, Running
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.rollout.staleness import misfit, too_old
from lightning_agentrl.rollout.state import rows_of
from lightning_agentrl.types import Rollout


class Background:
    """At most one rollout, being collected or ready. From ``begin`` to ``settle`` the environments belong to it.

    Args:
        max_staleness: greatest age of its turns when they are trained on, in iterations.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.ready: Rollout | None = None
        self.seconds = 0.0  # that collecting the last one took; 0 where it comes from a checkpoint
        self.before: dict[int, Any] | None = None  # the environments when a running or failed collection began
        self._running: Running[Rollout] | None = None
        self._clock = StageClock()  # of the agent, once a rollout is being collected
        self._total = self._done = 0
        self._awaited = self._raised = False  # somebody waits for it; its error was raised

    def begin(self, episodes: Collection, player: Player, loop: LoopThread, clock: StageClock) -> None:
        """Collect in the background.

        Args:
            episodes: the environments of this rank.
            player: plays them.
            loop: where it runs.
            clock: shows the progress while somebody waits.
        """
        self.before = episodes.state_dict()
        self._clock, self._total, self._done = clock, episodes.total, 0
        self._awaited = self._raised = False
        self._running = loop.begin(self._collect(episodes, replace(player, advance=self._advance)))

    def settle(self) -> bool:
        """Wait for a running collection; return whether it gave a rollout.

        If it failed, ``raise_failure`` raises its error, where the rollout is needed.
        """
        running = self._running
        if running is None or running.failed():
            return False
        with self._clock.stage("collect", self._total, self._done):
            self._awaited = True
            running.wait()
        if running.failed():
            return False
        self.ready, self._running, self.before = running.result(), None, None
        return True

    def adopt(self, rollout: Rollout, own_envs: Sequence[int], num_envs: int, turns: int | None, forks: bool) -> None:
        """Keep this rank's part of a rollout from a checkpoint, if it fits this run.

        Args:
            rollout: collected ahead, of all ranks.
            own_envs: environments of this rank.
            num_envs: environments of a rollout of this run.
            turns: turns of a rollout of this run, where their number is fixed.
            forks: whether this run needs the states of its rollouts forked.
        """
        if not _dropped(misfit(rollout, num_envs, turns, forks)):
            self.ready, self.seconds = rows_of(rollout, own_envs), 0.0

    def take(self, policy_version: int, steps_per_iteration: int, held_steps: range) -> Rollout | None:
        """Return the rollout, if one was begun and may be trained on. Every rank must call it.

        Args:
            policy_version: of the weights that are trained next.
            steps_per_iteration: by which the version grows in an iteration.
            held_steps: in which it grows and the policy stays the same.
        """
        taken, self.ready = self.ready, None
        if taken is None:
            return None
        reason = too_old(taken, policy_version, steps_per_iteration, held_steps, self.max_staleness)
        return None if _dropped(reason) else taken

    def raise_failure(self) -> None:
        """Raise the error of a collection that has failed.

        Raises:
            Exception: of an environment or of the engine.
        """
        if self._running is not None:
            self._raised = True
            self._running.result()

    def cancel(self) -> None:
        """End a running collection."""
        if self._running is not None:
            self._running.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether a collection was cancelled before its end."""
        return self._running is not None and self._running.cancelled

    @property
    def unraised(self) -> BaseException | None:
        """The error of a collection whose rollout nobody took."""
        return None if self._running is None or self._raised else self._running.error

    async def _collect(self, episodes: Collection, player: Player) -> Rollout:
        assert player.watchdog is not None
        started = time.perf_counter()
        with player.watchdog.on_guard():
            rollout = await episodes.collect(player)
        self.seconds = time.perf_counter() - started
        return rollout

    def _advance(self) -> None:
        self._done += 1
        if self._awaited:
            self._clock.advance()


def _dropped(reason: str) -> bool:
    """Return whether there is a reason to drop a rollout, and warn of it."""
    if reason:
        rank_zero_warn(f"the rollout that was collected ahead {reason}; it is dropped, and a new one is collected")
    return bool(reason)
