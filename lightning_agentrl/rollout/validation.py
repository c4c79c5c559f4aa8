"""Validation: whole episodes on fixed held-out seeds, in separate environments.

An episode that is lost to a fault of its environment counts as a failure, with the rewards up to then.
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
    """Settings of a validation.

    Args:
        episodes: held-out episodes over all ranks, with the first seeds of the list.
        num_envs: episodes played at a time on each rank.
        temperature: of sampling; 0 takes the most likely token.
        every: iterations from one validation of a fit to the next; 0: no validation; null: one, after the last
            iteration.
    """

    episodes: int = 128
    num_envs: int = 32
    temperature: float = 1.0
    every: int | None = None

    def __post_init__(self) -> None:
        available = len(held_out_seeds())
        if not 0 <= self.episodes <= available:
            raise ValueError(
                f"validation asks for {self.episodes} episodes, the held-out list has {available} seeds "
                "(key data.init_args.validation.episodes)"
            )
        if self.every is not None and self.every < 0:
            raise ValueError(f"data.init_args.validation.every must be at least 0, or null, got {self.every}")
        if self.num_envs < 1:
            raise ValueError(f"validation.num_envs must be at least 1, got {self.num_envs}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature of validation must be at least 0, got {self.temperature}; 0 takes the most likely token "
                "(key data.init_args.validation.temperature)"
            )


def planned_iterations(trainer: L.Trainer, steps_per_iteration: int) -> int | None:
    """Return the iterations of a run by ``max_epochs`` or ``max_steps``, whichever ends it; None without an end."""
    ends = [trainer.max_epochs] if trainer.max_epochs is not None and trainer.max_epochs >= 0 else []
    if trainer.max_steps >= 0:
        ends.append(trainer.max_steps // steps_per_iteration)
    return min(ends, default=None)


def validation_due(trainer: L.Trainer, every: int | None, steps_per_iteration: int) -> bool:
    """Return whether held-out episodes are played now: after some iterations of a fit, and always outside of one.

    Args:
        trainer: of the run.
        every: as in :class:`ValidationConfig`.
        steps_per_iteration: of the optimizer.
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
    """The seeds of one rank as the one batch of a validation loader; no batch if no validation is due.

    Lightning's loop runs after every iteration, so that its callbacks act after every iteration.

    Args:
        seeds: held-out seeds.
        due: whether a validation is due.
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
    """An episode from its start to its end.

    Args:
        place: of its seed in the list of held-out ones.
        source: number of its source in the list of sources.
        contract: what the environment offered last; nothing if it has never answered.
        samples: its turns with their tokens; empty if it was lost before its first turn.
        lost: kind of the fault of its environment that ended it; empty if none did.
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
        """The result of the episode; of a game of several sides that of each, as they count in training."""
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
        seeds: of the list of held-out ones.
        player: makes their sessions and plays them.
        at_a_time: environments that play at the same time.
        advance: called after each episode.
        watched: how many episodes are also returned whole, with pictures: those with the first seeds of the list.
        sample: number of the episode among several of the same seed, whose replies are drawn differently.

    Returns:
        Results of each seed: one, but of a game of several sides one for each side. And the
        watched episodes, in the order of the list.
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
            contract = Contract() if session.worker.answer is None else session.contract  # it may not even be made
            episode = WholeEpisode(place, kind, contract, samples, lost)
        finally:
            player.pool.give_back(kind, session.worker, held_out=True)
        results[index] = episode.results
        if watch:
            seen[place] = episode

    await play_parts([partial(play, index, seed) for index, seed in enumerate(seeds)], at_a_time, player.engine)
    return [results[index] for index in range(len(seeds))], [seen[place] for place in sorted(seen)]
