"""An environment that computes; in a file of its own, since processes of environments import it."""

from __future__ import annotations

from typing import Any

import gymnasium


def compute(rounds: int) -> int:
    """So many rounds of pure Python, which hold the interpreter."""
    total = 0
    for number in range(rounds):
        total = (total + number * number) % 1_000_003
    return total


class Busy(gymnasium.Env[str, str]):
    """Every step computes; episodes never end.

    Args:
        rounds: of a step.
    """

    system_prompt = "Reply with go."
    actions = {"go": "go on"}  # noqa: RUF012
    default_action = "go"

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return "step 0", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return f"step {self.count}, {compute(self.rounds)}", 0.0, False, False, {}


gymnasium.register("Busy-v0", Busy)
