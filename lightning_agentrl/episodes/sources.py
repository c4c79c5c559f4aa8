"""Several environments in one rollout, by their shares."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import gymnasium
import torch

from lightning_agentrl.episodes.make_errors import environment_problem
from lightning_agentrl.episodes.tasks import TaskSet
from lightning_agentrl.errors import ConfigError

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


@dataclass
class EnvConfig:
    """An environment as ``gymnasium.make`` takes it.

    Args:
        id: registered id, ``module:Name-v0`` imports the module first.
        kwargs: arguments of the environment.
        share: how much of what is played is played here, beside other environments.
        retries: how often an error of the environment is overcome in one reset or step: it is made anew, the episode
            is played again from its seed and actions, and the call is tried again.
    """

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    retries: int = 2
    share: float = 1.0

    def __post_init__(self) -> None:
        self.key = "data.init_args.env"  # under which it was given
        if self.retries < 0:
            raise ValueError(f"data.init_args.env.retries must be at least 0, got {self.retries}")
        if not self.share > 0:
            raise ValueError(f"data.init_args.env.share must be above 0, got {self.share}")

    @property
    def label(self) -> str:
        return f"{self.id} with {dict(sorted(self.kwargs.items()))}"

    def start(self, device: torch.device) -> None:
        """Nothing to do; see :class:`Source`."""

    def make(self, held_out: bool = False) -> gymnasium.Env:
        """Build the environment; held-out episodes differ by their seeds only.

        Raises:
            ValueError: when gymnasium does not know the id or the arguments, with the key to change.
        """
        try:
            return gymnasium.make(self.id, disable_env_checker=True, **self.kwargs)
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
            raise ConfigError(environment_problem(self.id, self.kwargs, error, self.key)) from error


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
