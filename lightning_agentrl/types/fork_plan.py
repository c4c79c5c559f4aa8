"""Which states are valued by playing on from them."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_BRANCHES = 10_000  # of one state; all of a rollout are there at once


@dataclass(frozen=True)
class ForkPlan:
    """Continuations of recorded episodes.

    Args:
        branches: continuations of each chosen state.
        every: the first turn of an episode in a rollout is chosen, and those whose number is a multiple of this.
        gamma: discount from turn to turn in what a continuation returns.
    """

    branches: int
    every: int
    gamma: float

    def __post_init__(self) -> None:
        for name in ("branches", "every"):
            if (given := getattr(self, name)) < 1:
                raise ValueError(f"forks need {name} of at least 1, got {given}")
        if self.branches > _MOST_BRANCHES:
            raise ValueError(f"forks need branches of at most {_MOST_BRANCHES}, got {self.branches}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"forks need a gamma between 0 and 1, got {self.gamma}")
