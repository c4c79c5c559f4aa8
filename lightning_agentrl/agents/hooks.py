"""The hooks that Lightning does not have: on a collected rollout, and between gradient and step."""

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
    """A callback that sees every collected rollout once, with scores and advantages, before the update."""

    held_out_watched = 0  # how many of the held-out episodes it wants to see, those with the first seeds, each time

    @abstractmethod
    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        """Look at the rows of this rank. Called on every rank; the time it takes counts as stage ``log``."""

    def on_engine_sync(self, trainer: L.Trainer, agent: Any) -> None:
        """Use the engine once it has taken over new weights and before it samples a rollout. Called on every rank."""

    def on_held_out(self, trainer: L.Trainer, agent: Any, episodes: Sequence[WholeEpisode]) -> None:
        """Receive the played held-out episodes of this rank, in the order of their seeds.

        There may be more than this callback wants, if another one wants more.
        """


def watching(trainer: L.Trainer) -> list[RolloutCallback]:
    """Return the callbacks that see rollouts."""
    return [callback for callback in cast(Any, trainer).callbacks if isinstance(callback, RolloutCallback)]


def show_rollout(agent: Any, rollout: Rollout) -> None:
    """Show a collected rollout to the callbacks."""
    for callback in watching(agent.trainer):
        callback.on_rollout(agent.trainer, agent, rollout)


def show_engine(agent: Any) -> None:
    """Let the callbacks use the engine that has taken over new weights."""
    for callback in watching(agent.trainer):
        callback.on_engine_sync(agent.trainer, agent)


def play_held_out(agent: Any, seeds: Sequence[int]) -> list[EpisodeResult]:
    """Play one whole episode per seed with the current weights, and show some of them to the callbacks."""
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
    """A step that is about to be taken.

    Args:
        number: of attempted steps before it.
        index: of the step within its iteration.
        metrics: means of losses and other numbers over the mini-batch and all ranks.
        norms: of the gradients before clipping by group, over all ranks; empty under ZeRO, which computes them later.
        rollout: numbers of the iteration's rollout over all ranks, as they are logged; inside a round of the critic
            warm-up there are none.
    """

    number: int
    index: int
    metrics: Mapping[str, float]
    norms: Mapping[str, float]
    rollout: Mapping[str, float]


class StepGuard(L.Callback, ABC):
    """A callback that may keep a step from being taken. It is not asked about one that is not finite.

    It may set ``lowered``, by which all learning rates are multiplied from this step on, and must then save it.
    """

    lowered: float = 1.0

    @abstractmethod
    def before_step(self, trainer: L.Trainer, attempt: Attempt) -> tuple[Verdict, str]:
        """Return whether to step, and if not, why; the severest verdict of any rank holds for all."""
