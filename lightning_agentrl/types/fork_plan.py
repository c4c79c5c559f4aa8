"""Which states are valued by playing on from them."""

from __future__ import annotations

from dataclasses import dataclass


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
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"forks need a gamma between 0 and 1, got {self.gamma}")
