"""The stream: one Lightning epoch is one iteration, a constant number of mini-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop

from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.rollout.mini_batches import split, spread
from lightning_agentrl.types import Rollout

Phase = Literal["critic_warmup", "train"]


@dataclass(frozen=True)
class Prepared:
    """A rollout with advantages and returns, and the numbers to be logged with its first step."""

    rollout: Rollout
    metrics: dict[str, float]


class MiniBatch:
    """The turns of one optimizer step on this rank, and numbers to be logged with it.

    Not a dataclass, so that Lightning leaves it as it is.
    """

    def __init__(self, rollout: Rollout, metrics: dict[str, float] | None = None) -> None:
        self.rollout = rollout
        self.metrics = metrics or {}


class RolloutSource(ABC):
    """Where the next iteration's turns come from, in place of the stream's own rollouts."""

    @property
    def phase(self) -> Phase:
        """What is trained on them."""
        return "train"

    @property
    def warmup_iterations(self) -> int:
        """Iterations at the start of a run in which the critic alone is trained."""
        return 0

    @abstractmethod
    def next_rollout(self, stream: RolloutStream) -> Prepared:
        """Return a prepared rollout for one epoch."""


class RolloutStream:
    """The mini-batches of one iteration. Collecting starts when the first one is asked for.

    Args:
        collect: gives the next raw rollout of this rank.
        prepare: scores a rollout and estimates its advantages and returns.
        num_envs: environments over all ranks.
        mini_batches: mini-batches per pass over a rollout.
        update_epochs: passes over a rollout.
        seed: of the shuffling, the same on all ranks.
        begin_next: starts collecting the rollout after the one that is there, with the weights from before its update.
        preparing: entered while the next rollout is collected and scored.
    """

    def __init__(
        self,
        collect: Callable[[], Rollout],
        prepare: Callable[[Rollout], Prepared],
        num_envs: int,
        mini_batches: int,
        update_epochs: int,
        seed: int,
        begin_next: Callable[[], None] = lambda: None,
        preparing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.collect = collect
        self.prepare = prepare
        self.num_envs = num_envs
        self.mini_batches = mini_batches
        self.update_epochs = update_epochs
        self.seed = seed
        self.begin_next = begin_next
        self.source: RolloutSource | None = None  # gives the rollouts while it is set
        self.preparing = preparing
        self.iteration = 0  # iterations begun
        self.inside_iteration = False  # mini-batches of the current iteration are still to come

    def __len__(self) -> int:
        return self.mini_batches * self.update_epochs

    def __iter__(self) -> Iterator[MiniBatch]:
        self.inside_iteration = False  # an iteration that an error ended is not gone on with
        with self.preparing():
            prepared = self.next_rollout() if self.source is None else self.source.next_rollout(self)
        rollout, metrics = prepared.rollout, prepared.metrics
        self.iteration += 1
        envs = [sample.turns[0].env for sample in rollout.samples]
        for epoch in range(self.update_epochs):
            places = spread(envs, self.num_envs, derive_seed(self.seed, self.iteration, epoch))
            for k, rows in enumerate(split(places, self.mini_batches)):
                last = epoch + 1 == self.update_epochs and k + 1 == self.mini_batches
                self.inside_iteration = not last
                yield MiniBatch(rollout.select(rows), metrics)
                metrics = {}

    def next_rollout(self) -> Prepared:
        """Return the next rollout, prepared for one epoch."""
        rollout = self.collect()
        self.begin_next()
        return self.prepare(rollout)


def resume_between_epochs(fit_loop: _FitLoop) -> None:
    """Let a run that is resumed from the end of an epoch begin with the next one.

    With ``max_steps``, Lightning would take one more batch of the last one.
    """
    progress = cast(Any, fit_loop.epoch_progress.current)
    if progress.ready == progress.started == progress.processed:
        cast(Any, _Loop.restarting).fset(fit_loop, False)  # its own setter does not with max_steps
