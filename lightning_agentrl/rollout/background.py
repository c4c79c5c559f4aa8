"""The rollout after the one that is trained on: collected in the background, and kept until it is its turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.rollout.collection import Collection
from lightning_agentrl.rollout.collector import Collector
from lightning_agentrl.rollout.event_loop import LoopThread
from lightning_agentrl.rollout.staleness import misfit, too_old
from lightning_agentrl.rollout.state import rows_of
from lightning_agentrl.types import Rollout


@dataclass(frozen=True)
class Collected:
    """A rollout that waits to be trained on."""

    rollout: Rollout
    seconds: float = 0.0  # that collecting took; 0 where it comes out of a checkpoint


class NextRollout:
    """At most one rollout, on its way or there. From ``begin`` to ``settle`` the environments belong to it.

    Args:
        max_staleness: iterations that its turns may be old when they are trained on.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.collected: Collected | None = None
        self._background: Background | None = None

    def begin(self, collection: Collection, collector: Collector, loop: LoopThread, clock: StageClock) -> None:
        """Collect in the background."""
        self._background = Background(collection, collector, loop, clock)

    def settle(self) -> bool:
        """Wait for what is on its way; whether a rollout has come. ``take`` raises its error, where it is needed."""
        background = self._background
        if background is None or background.failed():
            return False
        background.wait()
        if background.failed():
            return False
        self.collected, self._background = background.result(), None
        return True

    def adopt(self, rollout: Rollout, own_envs: Sequence[int], num_envs: int, turns: int | None) -> None:
        """Take in what a checkpoint holds of all ranks.

        Args:
            rollout: that was collected ahead.
            own_envs: environments of this rank.
            num_envs: of a rollout of this run.
            turns: of a rollout of this run, where their number is fixed.
        """
        if not _left_out(misfit(rollout, num_envs, turns)):
            self.collected = Collected(rows_of(rollout, own_envs))

    def take(self, policy_version: int, steps_per_iteration: int) -> Collected | None:
        """The rollout, if one was begun and may be trained on. Every rank must call it.

        Args:
            policy_version: of the weights that are trained next.
            steps_per_iteration: by which it grows in an iteration.

        Raises:
            Exception: that of an environment or of the engine, which ended the collection.
        """
        if self._background is not None:
            self._background.result()
        taken, self.collected = self.collected, None
        if taken is None:
            return None
        reason = too_old(taken.rollout, policy_version, steps_per_iteration, self.max_staleness)
        return None if _left_out(reason) else taken

    def cancel(self) -> None:
        """End what is on its way."""
        if self._background is not None:
            self._background.cancel()

    @property
    def cancelled(self) -> bool:
        return self._background is not None and self._background.cancelled

    @property
    def before(self) -> dict[int, Any] | None:
        """Where a collection that came to no end found the environments; None: there is none."""
        return None if self._background is None else self._background.before

    @property
    def untold(self) -> BaseException | None:
        """The error of a rollout that nobody took."""
        return None if self._background is None else self._background.untold


class Background:
    """One collection that runs beside the trainer, from now on.

    Args:
        collection: the environments.
        collector: what plays them.
        loop: where it runs.
        clock: is told how far it is while somebody waits.
    """

    def __init__(self, collection: Collection, collector: Collector, loop: LoopThread, clock: StageClock) -> None:
        self.before = collection.state_dict()
        self._total, self._done = collection.total, 0
        self._clock = clock
        self._awaited = self._told = False
        self._running = loop.begin(self._collect(collection, replace(collector, advance=self._advance)))

    def failed(self) -> bool:
        """Whether it ended without a rollout, by an error or because it was cancelled."""
        return self._running.failed()

    @property
    def cancelled(self) -> bool:
        return self._running.cancelled

    @property
    def untold(self) -> BaseException | None:
        """An error that ``result`` has not raised."""
        return None if self._told else self._running.error

    def wait(self) -> None:
        """Until it has ended, however it did."""
        with self._clock.stage("collect", self._total, self._done):
            self._awaited = True
            self._running.wait()

    def result(self) -> Collected:
        self._told = True
        return self._running.result()

    def cancel(self) -> None:
        self._running.cancel()

    async def _collect(self, collection: Collection, collector: Collector) -> Collected:
        assert collector.watchdog is not None
        started = time.perf_counter()
        with collector.watchdog.on_guard():
            rollout = await collection.collect(collector)
        return Collected(rollout, time.perf_counter() - started)

    def _advance(self) -> None:
        self._done += 1
        if self._awaited:
            self._clock.advance()


def _left_out(reason: str) -> bool:
    """Whether there is a reason; says it."""
    if reason:
        rank_zero_warn(f"the rollout that was collected ahead {reason}; it is left out, and a new one is collected")
    return bool(reason)
