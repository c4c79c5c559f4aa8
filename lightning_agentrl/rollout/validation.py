"""Validation: whole episodes on fixed held-out seeds, in environments of their own.

An episode that is lost to a fault of its environment counts as one that did not succeed, with the rewards up to then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.seeds import held_out_place, held_out_seeds
from lightning_agentrl.metrics.episodes import EpisodeResult, summarise
from lightning_agentrl.rollout.player import Player, play_parts
from lightning_agentrl.types import Sample, Turn

T = TypeVar("T")


@dataclass
class ValidationConfig:
    """What a validation plays.

    Args:
        episodes: held-out episodes over all ranks, with the first seeds of the list.
        num_envs: episodes played at a time on each rank.
        temperature: of sampling; 0 takes the most likely token.
    """

    episodes: int = 128
    num_envs: int = 32
    temperature: float = 1.0

    def __post_init__(self) -> None:
        available = len(held_out_seeds())
        if not 0 <= self.episodes <= available:
            raise ValueError(
                f"validation asks for {self.episodes} episodes, the held-out list has {available} seeds "
                "(key data.init_args.validation.episodes)"
            )
        if self.num_envs < 1:
            raise ValueError(f"validation.num_envs must be at least 1, got {self.num_envs}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature of validation must be at least 0, got {self.temperature}; 0 takes the most likely token "
                "(key data.init_args.validation.temperature)"
            )


class EpisodeSeeds:
    """The seeds of one rank as the one batch of a validation loader."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = list(seeds)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EpisodeSeeds]:
        yield self


@dataclass(frozen=True)
class WholeEpisode:
    """An episode from its start to its end.

    Args:
        place: of its seed in the list of held-out ones.
        source: what it was played in, its place in the list of sources.
        contract: what the environment offered last; nothing if it has never answered.
        samples: its turns, with what was read and said; empty if it was lost before its first.
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
    at_a_time: int,
    player: Player,
    keep: Callable[[WholeEpisode], T],
    advance: Callable[[], None],
    pictures: int = 0,
) -> list[T]:
    """Play one whole episode per seed, ``at_a_time`` of them at a time.

    Args:
        seeds: of the episodes.
        at_a_time: environments that play beside each other.
        player: makes their sessions and plays them.
        keep: returns what is kept of an episode.
        advance: called after each episode.
        pictures: draw the turns of the first so many seeds of the list, if the environment can.

    Returns:
        What is kept, in the order of the seeds.
    """
    kept: dict[int, T] = {}

    async def play(place: int, seed: int) -> None:
        number = held_out_place(seed)
        kind = player.pool.kind(number)
        session = player.session(kind, seed, lambda _: seed, pictures=number < pictures, held_out=True)
        try:
            samples, lost = await player.play_episode(session)
            advance()
            contract = Contract() if session.worker.answer is None else session.contract  # it may not even be made
            kept[place] = keep(WholeEpisode(number, kind, contract, samples, lost))
        finally:
            player.pool.give_back(kind, session.worker, held_out=True)

    await play_parts([partial(play, place, seed) for place, seed in enumerate(seeds)], at_a_time, player.engine)
    return [kept[place] for place in range(len(seeds))]
