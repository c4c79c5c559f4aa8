"""Several environments in one rollout, by their shares."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import gymnasium
import torch

from lightning_agentrl.rollout.session import EnvConfig
from lightning_agentrl.rollout.tasks import TaskSet

GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, fill [0, 1) evenly however they are cut


class Source(Protocol):
    """What makes environments of one kind."""

    @property
    def share(self) -> float:
        """Of what is played."""

    @property
    def retries(self) -> int:
        """See :class:`EnvConfig`."""

    @property
    def label(self) -> str:
        """What its episodes follow from, beside a seed."""

    def make(self, held_out: bool = False) -> gymnasium.Env:
        """An environment for training, or for validation."""

    def start(self, device: torch.device) -> None:
        """Called once the policy is on this device."""


class EnvMix:
    """Which source an environment is of, by its number; the same on any number of ranks.

    Args:
        sources: at least one.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        total = sum(source.share for source in sources)
        self._bounds = [bound / total for bound in accumulate(source.share for source in sources)][:-1]

    def kind(self, number: int) -> int:
        """Place of the source in the list. Any stretch of numbers has nearly its share of every source."""
        return bisect_right(self._bounds, number * GOLDEN % 1.0)

    def source(self, number: int) -> Source:
        return self.sources[self.kind(number)]

    @property
    def label(self) -> str:
        if len(self.sources) == 1:
            return self.sources[0].label
        return " and ".join(f"{source.label} (share {source.share:g})" for source in self.sources)


def all_sources(env: EnvConfig | None, others: Sequence[EnvConfig], tasks: TaskSet | None) -> list[Source]:
    """Everything that is played.

    Raises:
        ValueError: nothing is.
    """
    for place, other in enumerate(others):
        other.key = f"data.init_args.other_envs[{place}]"
    sources: list[Source] = [source for source in (env, *others, tasks) if source is not None]
    if not sources:
        raise ValueError(
            "there is nothing to play; give an environment (key data.init_args.env) or one-turn tasks (key "
            "data.init_args.tasks)"
        )
    return sources
