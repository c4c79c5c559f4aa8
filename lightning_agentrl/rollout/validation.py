"""Validation: whole episodes on fixed held-out seeds, in environments of their own.

An episode that is lost to a fault of its environment counts as one that did not succeed, with the rewards up to then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_agentrl.episodes.seeds import held_out_place, held_out_seeds
from lightning_agentrl.metrics.episodes import EpisodeResult, summarise
from lightning_agentrl.rollout.player import Player
from lightning_agentrl.rollout.seats import play_parts
from lightning_agentrl.rollout.session_maker import SessionMaker


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


class EpisodeSeeds:
    """The seeds of one rank as the one batch of a validation loader."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.seeds = list(seeds)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EpisodeSeeds]:
        yield self


async def play_episodes(
    seeds: Sequence[int], at_a_time: int, make: SessionMaker, player: Player
) -> list[EpisodeResult]:
    """Play one whole episode per seed, ``at_a_time`` of them at a time; return results in the order of the seeds."""
    results: dict[int, EpisodeResult] = {}

    async def play(place: int, seed: int) -> None:
        kind = make.pool.kind(held_out_place(seed))
        session = make.session(kind, seed, partial(_constant, seed), held_out=True)
        try:
            turns, lost = await player.episode(session)
            results[place] = summarise(turns, bool(lost))
        finally:
            make.end(session, kind, held_out=True)

    await play_parts([partial(play, place, seed) for place, seed in enumerate(seeds)], at_a_time, player.engine)
    return [results[place] for place in range(len(seeds))]


def _constant(seed: int, episode: int) -> int:
    """Return the episode seed of a session that plays one episode only."""
    return seed
