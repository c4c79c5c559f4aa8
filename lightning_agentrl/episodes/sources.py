"""What episodes are made of: an environment, or a set of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium
import torch

from lightning_agentrl.episodes.tasks import TaskSet
from lightning_agentrl.errors import ConfigError, environment_problem

ENV, ENVS = "data.init_args.env", "data.init_args.envs"  # the keys of one source, and of several


class Source(Protocol):
    """What makes environments of one kind."""

    key: str  # of the configuration, under which it was given

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
        share: how much of what is played is played here, beside the other sources.
        retries: how often an error of the environment is overcome in one reset or step: it is made anew, the episode
            is played again from its seed and actions, and the call is tried again.
    """

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    retries: int = 2
    share: float = 1.0

    def __post_init__(self) -> None:
        self.key = ENV

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


def all_sources(env: EnvConfig | None, envs: Sequence[EnvConfig | TaskSet] | None) -> list[Source]:
    """Return everything that is played, in the order in which it was given, each with the key under which it was.

    Raises:
        ValueError: nothing is given, both forms are, or a number is out of range; with the key to change.
    """
    if env is not None and envs is not None:
        raise ValueError(f"{ENV} is the short form of {ENVS} for one environment; give one of the two, the other null")
    sources: list[Source] = [env] if env is not None else [*(envs or ())]
    if not sources:
        raise ValueError(
            f"there is nothing to play; give an environment (key {ENV}) or a list of environments and task sets (key "
            f"{ENVS})"
        )
    for place, source in enumerate(sources):
        source.key = ENV if env is not None else f"{ENVS}[{place}]"
        if source.retries < 0:
            raise ValueError(f"{source.key}.retries must be at least 0, got {source.retries}")
        if not source.share > 0:
            raise ValueError(f"{source.key}.share must be above 0, got {source.share}")
    return sources
