"""Baselines: what a uniformly random agent draws from."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium

from agentrl_envs import TextEnv, baselines


class NewNames(TextEnv):
    """Two actions in each turn, with new names; the second one pays."""

    actions: ClassVar[dict[str, str]] = {"a0": "", "b0": ""}
    default_action = "a0"
    max_turns = 20

    @property
    def system_prompt(self) -> str:
        return "Take one."

    def _offer(self) -> None:
        self.actions = {f"a{self.turn}": "", f"b{self.turn}": ""}  # type: ignore[misc]
        self.default_action = f"a{self.turn}"

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._offer()

    def _act(self, action: str) -> tuple[float, bool]:
        self._offer()
        return float(action.startswith("b")), False

    def _observe(self) -> tuple[str, str]:
        return "new names", ""


gymnasium.register("NewNames-v0", NewNames)


def test_a_random_agent_draws_from_the_actions_of_the_turn() -> None:
    found = baselines.random_agent("NewNames-v0", range(50))
    assert 9 < found.mean_return < 11  # ten of twenty; three standard errors are 0.95
