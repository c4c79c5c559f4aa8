"""Stream of mini-batches. One Lightning epoch is one iteration with a constant number of random mini-batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import lightning as L
import numpy as np

from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.rollout.collector import Collector, Prepared
from lightning_agentrl.rollout.sizes import RolloutSizes
from lightning_agentrl.types import Rollout

Phase = Literal["critic_warmup", "train"]


class MiniBatch:
    """The turns of one optimizer step on this rank, and metrics to log with the step.

    The class is not a dataclass, since Lightning would move a dataclass to the device; each micro-batch is moved later.
    """

    def __init__(self, rollout: Rollout, metrics: dict[str, float] | None = None) -> None:
        self.rollout = rollout
        self.metrics = metrics or {}


class RolloutSource(ABC):
    """Source of prepared rollouts that replaces the stream's own collection."""

    @property
    def phase(self) -> Phase:
        """Phase of the iteration: ``critic_warmup`` or ``train``."""
        return "train"

    @property
    def warmup_iterations(self) -> int:
        """Number of iterations at the start of a run in which only the critic is trained."""
        return 0

    @abstractmethod
    def next_rollout(self, stream: RolloutStream) -> Prepared:
        """Return a prepared rollout for one epoch."""


class RolloutStream:
    """Iterable over the mini-batches of one iteration, which :meth:`begin_iteration` or the first mini-batch begins.

    Args:
        collector: collector of this rank's rollouts.
        prepare: function that scores a rollout and estimates its advantages and returns.
        sizes: sizes of rollouts and mini-batches.
        seed: seed of the shuffling, the same on all ranks.
    """

    def __init__(
        self, collector: Collector, prepare: Callable[[Rollout], Prepared], sizes: RolloutSizes, seed: int
    ) -> None:
        self.collector = collector
        self.prepare = prepare
        self.sizes = sizes
        self.seed = seed
        self.source: RolloutSource | None = None  # source of rollouts; None means the collector
        self.inside_iteration = False  # whether mini-batches of the current iteration remain
        self._prepared: Prepared | None = None  # rollout of an iteration before its first mini-batch

    def __len__(self) -> int:
        return self.sizes.steps_per_iteration

    def begin_iteration(self) -> None:
        """Collect and prepare a rollout. An iteration that ended with an error is not continued."""
        self.inside_iteration = False
        with self.collector.prepare_update():
            self._prepared = self.next_rollout() if self.source is None else self.source.next_rollout(self)
        self.inside_iteration = True

    def __iter__(self) -> Iterator[MiniBatch]:
        if self._prepared is None:
            self.begin_iteration()
        assert self._prepared is not None
        (rollout, metrics), self._prepared = (self._prepared.rollout, self._prepared.metrics), None
        for epoch in range(self.sizes.update_epochs):
            places = self.places_of(rollout, self.collector.iteration, epoch)
            for k, rows in enumerate(split(places, self.sizes.mini_batches)):
                last = epoch + 1 == self.sizes.update_epochs and k + 1 == self.sizes.mini_batches
                self.inside_iteration = not last
                yield MiniBatch(rollout.select(rows), metrics)
                metrics = {}

    def next_rollout(self) -> Prepared:
        """Return the next rollout, prepared for one epoch, and start the next background collection if allowed."""
        rollout = self.collect()
        self.collector.begin_next()
        return self.prepare(rollout)

    def collect(self) -> Rollout:
        """Return the next raw rollout of this rank."""
        return self.collector.collect()

    def places_of(self, rollout: Rollout, *counters: int) -> np.ndarray:
        """Return random numbers in [0, 1), one per row of a rollout, that depend on the seed and ``counters``."""
        firsts = [sample.turns[0] for sample in rollout.samples]
        # Parallel calls of an agent arrive in any order, which must not determine the mini-batches.
        rows = sorted(range(len(firsts)), key=lambda i: (firsts[i].episode if firsts[i].call else 0, firsts[i].call))
        places = np.empty(len(rows))
        envs = [firsts[i].env for i in rows]
        places[rows] = spread(envs, self.sizes.envs_per_rollout, derive_seed(self.seed, *counters))
        return places


def spread(envs: Sequence[int], num_envs: int, seed: int) -> np.ndarray:
    """Return a random number in [0, 1) for each row, independent of the rank on which the row is.

    The rows of each environment are permuted and spread evenly over [0, 1), with a random shift per environment. So any
    interval contains nearly the same number of rows of every environment. If all environments have equally many rows,
    an interval contains exactly its share of all rows, if this share is an integer.

    Args:
        envs: environment of each row of this rank, as an index over all ranks; rows are in order of time.
        num_envs: number of environments over all ranks.
        seed: random seed, the same on all ranks.
    """
    shift = np.random.default_rng([seed, num_envs]).permutation(num_envs)
    places = np.empty(len(envs))
    by_env = np.argsort(envs, kind="stable")
    owners, firsts = np.unique(np.asarray(envs)[by_env], return_index=True)
    # Not strict, since `np.split` of no rows returns one empty part.
    for env, rows in zip(owners.tolist(), np.split(by_env, firsts[1:]), strict=False):
        order = np.random.default_rng([seed, num_envs, env]).permutation(len(rows))
        places[rows] = (order + (shift[env] + 0.5) / num_envs) / len(rows)
    return places


def split(places: np.ndarray, count: int, upto: float = 1.0) -> list[list[int]]:
    """Split the rows with ``places`` below ``upto`` into ``count`` intervals of equal width; return row indices."""
    part = np.floor(places / upto * count).astype(int)
    return [np.flatnonzero(part == k).tolist() for k in range(count)]


def begin_next_epoch(trainer: L.Trainer) -> None:
    """Let a run that resumes at the end of an epoch begin with the next epoch.

    With ``max_steps``, Lightning resumes inside the last epoch and would request one more batch of that epoch.
    """
    progress, loop = trainer.fit_loop.epoch_progress, trainer.fit_loop
    current = cast(Any, progress.current)
    if loop.restarting and current.ready == current.started == current.processed:
        if current.completed < current.processed:
            progress.increment_completed()
        loop.epoch_loop.restarting = False
