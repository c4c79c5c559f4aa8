"""Demonstrations: whole episodes to be cloned, and the mini-batches made of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.distributed import all_gather, rank, world_size
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses.aggregation import action_weights
from lightning_agentrl.rollout.data_module import RolloutDataModule
from lightning_agentrl.rollout.stream import Prepared, RolloutSource, RolloutStream
from lightning_agentrl.types import Rollout, Sample, Scores, Turn


@dataclass(frozen=True)
class Demonstration:
    """A whole episode."""

    samples: tuple[Sample, ...]

    @property
    def turns(self) -> list[Turn]:
        return [turn for sample in self.samples for turn in sample.turns]

    @property
    def outcome(self) -> float:
        """The sum of the environment's rewards."""
        return self.turns[-1].episode_return


class Demonstrations(ABC):
    """Where the episodes come from that are cloned."""

    @abstractmethod
    def load(self, data: RolloutDataModule, tokenizer: PreTrainedTokenizerBase) -> list[Demonstration]:
        """Return the whole episodes of this rank.

        Args:
            data: environments, prompts and interaction, connected to an agent.
            tokenizer: of the model that learns.

        Raises:
            ConfigError: one sentence; they cannot be had, or not for this model.
        """


def chosen(episodes: Sequence[Demonstration], min_return: float) -> list[Demonstration]:
    """Return the episodes of this rank that earned at least so much; every rank must call it.

    Raises:
        ConfigError: there are no episodes on any rank, or none that did; or none of these is of this rank.
    """
    outcomes = [outcome for part in all_gather([episode.outcome for episode in episodes]) for outcome in part]
    if not outcomes:
        raise ConfigError("there is no whole episode to clone; give more episodes, or a longer recorded run")
    enough = sum(outcome >= min_return for outcome in outcomes)
    if not enough:
        raise ConfigError(
            f"none of {len(outcomes)} episodes earned at least min_return {min_return:g}, and the best earned "
            f"{max(outcomes):g}; lower min_return"
        )
    kept = [episode for episode in episodes if episode.outcome >= min_return]
    if not kept:
        raise ConfigError(
            f"process {rank()} has none of the {enough} episodes that are cloned, which {world_size()} processes "
            "share; give more episodes, or fewer processes (trainer.devices)"
        )
    return kept


def what_is_cloned(kept: Sequence[Demonstration], episodes: int, iterations: float) -> str:
    """Return a sentence about the episodes of all ranks; every rank must call it.

    Args:
        kept: of this rank.
        episodes: of this rank, before some were left out.
        iterations: of one pass over them.
    """
    own = (sum(len(each.turns) for each in kept), len(kept), episodes, math.fsum(each.outcome for each in kept))
    parts = all_gather((own, iterations))
    turns, count, every, earned = (sum(each) for each in zip(*(part for part, _ in parts), strict=True))
    return (
        f"cloning {turns} turns of {count} episodes out of {every}, of mean return {earned / count:.3g}; one pass over "
        f"them takes {max(passes for _, passes in parts):.1f} iterations"
    )


class ClonedTurns(RolloutSource):
    """Iterations of demonstrated turns, as many as a rollout has, in a new random order in each pass over them.

    What an iteration holds follows from its number, so a resumed run goes on exactly. A rank with more of the turns
    takes more of them, so that all ranks come to the end of a pass together. Every rank must make one.

    Args:
        episodes: of this rank.
        data: says how many turns an iteration has.
        action_share: of a reply's weight, the part of the tokens that name the action, where a thought precedes.
    """

    def __init__(self, episodes: Sequence[Demonstration], data: RolloutDataModule, action_share: float) -> None:
        self.samples = [sample for episode in episodes for sample in episode.samples]
        self.action_share = action_share
        self.seed = data.seed
        self.places = data.own_envs  # rows are spread over mini-batches as those of environments are
        own = (sum(len(sample.turns) for sample in self.samples), len(episodes), len(self.places))
        turns, played, places = (sum(each) for each in zip(*all_gather(own), strict=True))
        per_place = turns / played if data.groups is not None else data.sizes.turns_per_env
        wanted = places * per_place * len(self.samples) / turns
        self.count = max(round(wanted), data.sizes.mini_batches)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, int))  # of the pass that was looked into last

    def next_rollout(self, stream: RolloutStream) -> Prepared:
        """Return the samples of the next iteration with the weights of their tokens."""
        first = stream.iteration * self.count
        picked = [self._sample(place) for place in range(first, first + self.count)]
        placed = [_placed(sample, self.places[k % len(self.places)]) for k, sample in enumerate(picked)]
        rollout = Rollout.from_samples(placed)
        weights = action_weights(rollout, self.action_share, drop_invalid=True)
        # The engine sampled nothing, so there is no gap to it: these stand for the log-probs from before the update.
        scores = Scores(old_logps=rollout.rollout_logps)
        return Prepared(rollout.union(weights=weights, scores=scores), {"clone/passes": first / len(self.samples)})

    def _sample(self, place: int) -> Sample:
        number, at = divmod(place, len(self.samples))
        if self._order[0] != number:
            generator = np.random.default_rng(derive_seed(self.seed, number))
            self._order = (number, generator.permutation(len(self.samples)))
        return self.samples[self._order[1][at]]


def _placed(sample: Sample, env: int) -> Sample:
    return replace(sample, turns=tuple(replace(turn, env=env) for turn in sample.turns))
