"""Validation: whole episodes on fixed held-out seeds, in separate environments.

An episode that is lost to a fault of its environment counts as a failure, with the rewards before the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.seeds import held_out_place, held_out_seeds
from lightning_agentrl.metrics.episodes import EpisodeResult, summarise
from lightning_agentrl.rollout.player import Player, play_parts
from lightning_agentrl.types import Sample, Turn


@dataclass
class ValidationConfig:
    """Settings of validation.

    Args:
        episodes: number of held-out episodes over all ranks, which use the first seeds of the list.
        num_envs: number of concurrent episodes on each rank.
        temperature: temperature of sampling; 0 selects the most likely token.
        every: number of iterations between two validations of a fit; 0 means no validation, null one validation after
            the last iteration.
    """

    episodes: int = 128
    num_envs: int = 32
    temperature: float = 1.0
    every: int | None = None

    def __post_init__(self) -> None:
        available = len(held_out_seeds())
        if not 0 <= self.episodes <= available:
            raise ValueError(
                f"data.init_args.validation.episodes must be from 0 to {available}, the number of held-out seeds, got "
                f"{self.episodes}"
            )
        if self.every is not None and self.every < 0:
            raise ValueError(f"data.init_args.validation.every must be at least 0, or null, got {self.every}")
        if self.num_envs < 1:
            raise ValueError(f"data.init_args.validation.num_envs must be at least 1, got {self.num_envs}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"data.init_args.validation.temperature must be finite and at least 0, got {self.temperature}; 0 "
                "samples the most likely token"
            )


def planned_iterations(trainer: L.Trainer, steps_per_iteration: int) -> int | None:
    """Return the number of iterations of a run by ``max_epochs`` or ``max_steps``; None if neither limits it."""
    ends = [trainer.max_epochs] if trainer.max_epochs is not None and trainer.max_epochs >= 0 else []
    if trainer.max_steps >= 0:
        ends.append(trainer.max_steps // steps_per_iteration)
    return min(ends, default=None)


def validation_due(trainer: L.Trainer, every: int | None, steps_per_iteration: int) -> bool:
    """Return whether held-out episodes are due: after certain iterations of a fit, and always outside of a fit.

    Args:
        trainer: trainer of the run.
        every: interval as in :class:`ValidationConfig`.
        steps_per_iteration: number of optimizer steps per iteration.
    """
    if trainer.state.fn != TrainerFn.FITTING or cast(Any, trainer).fast_dev_run:
        return True
    done = trainer.current_epoch + 1
    if every is None:
        last = planned_iterations(trainer, steps_per_iteration)
        due = trainer.check_val_every_n_epoch != 1 or done == last
    else:
        due = every > 0 and done % every == 0
    return due and not trainer.sanity_checking


class EpisodeSeeds:
    """Validation loader whose only batch is the seeds of one rank. The loader is empty if no validation is due.

    Lightning's validation loop thus runs after every iteration, and with it the validation hooks of callbacks.

    Args:
        seeds: held-out seeds.
        due: function that returns whether a validation is due.
    """

    def __init__(self, seeds: Sequence[int], due: Callable[[], bool]) -> None:
        self.seeds = list(seeds)
        self.due = due

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EpisodeSeeds]:
        if self.due():
            yield self


@dataclass(frozen=True)
class WholeEpisode:
    """A whole held-out episode.

    Args:
        place: index of the episode's seed in the list of held-out seeds.
        source: index of the episode's source.
        contract: last contract of the environment; empty if the environment never answered.
        samples: samples with the turns; empty if the episode was lost before its first turn.
        lost: kind of the fault that ended the episode; empty without a fault.
    """

    place: int
    source: int
    contract: Contract
    samples: Sequence[Sample]
    lost: str

    @property
    def turns(self) -> list[Turn]:
        return [turn for sample in self.samples for turn in sample.turns]

    @property
    def results(self) -> list[EpisodeResult]:
        """The result of the episode; in a game with several sides, one result per side, as in training."""
        sides: dict[int, list[Turn]] = {}
        for turn in self.turns:
            sides.setdefault(turn.episode, []).append(turn)
        return [summarise(turns, bool(self.lost), self.source) for turns in sides.values() or [[]]]


async def play_episodes(
    seeds: Sequence[int],
    player: Player,
    at_a_time: int,
    advance: Callable[[], None],
    watched: int = 0,
    sample: int = 0,
) -> tuple[list[list[EpisodeResult]], list[WholeEpisode]]:
    """Play one whole episode per held-out seed.

    Args:
        seeds: held-out seeds.
        player: player of the episodes.
        at_a_time: number of concurrent environments.
        advance: function that is called after each episode.
        watched: number of episodes, for the first seeds of the list, to return in full with pictures.
        sample: index of the episode among several with the same seed; the seeds of replies depend on it.

    Returns:
        A list of results for each seed (one, or one per side of a game), and the watched episodes in the order of their
        seeds.
    """
    results: dict[int, list[EpisodeResult]] = {}
    seen: dict[int, WholeEpisode] = {}

    async def play(index: int, seed: int) -> None:
        place = held_out_place(seed)
        kind = player.pool.kind(place)
        watch = place < watched
        session = player.session(kind, seed, lambda _: seed, watch, first_episode=sample, held_out=True)
        try:
            samples, lost = await player.play_episode(session)
            advance()
            # Return an empty contract if the environment was never created.
            contract = Contract() if session.worker.answer is None else session.contract
            episode = WholeEpisode(place, kind, contract, samples, lost)
        finally:
            player.pool.give_back(kind, session.worker, held_out=True)
        results[index] = episode.results
        if watch:
            seen[place] = episode

    await play_parts([partial(play, index, seed) for index, seed in enumerate(seeds)], at_a_time, player.engine)
    return [results[index] for index in range(len(seeds))], [seen[place] for place in sorted(seen)]
