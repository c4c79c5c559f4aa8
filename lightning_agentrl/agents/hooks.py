"""Callback hooks that Lightning does not have: on a collected rollout, and between gradient and step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import lightning as L

from lightning_agentrl.metrics.episodes import EpisodeResult
from lightning_agentrl.rollout.validation import WholeEpisode
from lightning_agentrl.types import Rollout


class RolloutCallback(L.Callback, ABC):
    """Base class of callbacks that receive every collected rollout, with scores and advantages, before the update."""

    held_out_watched = 0  # number of held-out episodes to receive at each validation, starting from the first seed

    @abstractmethod
    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        """Process the rollout of this rank. Called on every rank; the time of the call counts as stage ``log``."""

    def on_engine_sync(self, trainer: L.Trainer, agent: Any) -> None:
        """Use the engine after it has loaded new weights and before it samples a rollout. Called on every rank."""

    def on_held_out(self, trainer: L.Trainer, agent: Any, episodes: Sequence[WholeEpisode]) -> None:
        """Receive held-out episodes of this rank, in the order of their seeds.

        There may be more episodes than this callback's ``held_out_watched``, if another callback requests more.
        """


def watching(trainer: L.Trainer) -> list[RolloutCallback]:
    """Return the trainer's callbacks that receive rollouts."""
    return [callback for callback in cast(Any, trainer).callbacks if isinstance(callback, RolloutCallback)]


def show_rollout(agent: Any, rollout: Rollout) -> None:
    """Pass a collected rollout to the callbacks."""
    for callback in watching(agent.trainer):
        callback.on_rollout(agent.trainer, agent, rollout)


def show_engine(agent: Any) -> None:
    """Let the callbacks use the engine after it has loaded new weights."""
    for callback in watching(agent.trainer):
        callback.on_engine_sync(agent.trainer, agent)


def play_held_out(agent: Any, seeds: Sequence[int]) -> list[EpisodeResult]:
    """Play one whole episode per seed with the current weights, and pass some of them to the callbacks."""
    callbacks, data = watching(agent.trainer), agent.datamodule
    most = max((callback.held_out_watched for callback in callbacks), default=0)
    results, seen = data.collector.play_held_out(seeds, data.validation, most)
    for callback in callbacks:
        callback.on_held_out(agent.trainer, agent, seen)
    return results


class Verdict(IntEnum):
    """Decision of a guard about a gradient."""

    STEP = 0
    SKIP = 1
    STOP = 2


@dataclass(frozen=True)
class Attempt:
    """An optimizer step that is about to be taken.

    Args:
        number: number of steps attempted before this step.
        index: index of the step within its iteration.
        metrics: means of losses and other metrics over the mini-batch and all ranks.
        norms: gradient norms before clipping by parameter group, over all ranks; empty under ZeRO, which computes norms
            later.
        rollout: metrics of the iteration's rollout over all ranks, as they are logged; empty within a round of the
            critic warm-up, after the round's first iteration.
    """

    number: int
    index: int
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    rollout: Mapping[str, float]


class StepGuard(L.Callback, ABC):
    """Base class of callbacks that can skip an optimizer step or stop the run before it.

    Steps with non-finite loss or gradient are skipped without calling guards. A guard may set ``lowered``, a factor of
    all learning rates from this step on, and must then store it in its ``state_dict``.
    """

    lowered: float = 1.0

    @abstractmethod
    def before_step(self, trainer: L.Trainer, attempt: Attempt) -> tuple[Verdict, str]:
        """Return a verdict and, unless it is ``STEP``, a reason; the most severe verdict of any rank applies to all."""
