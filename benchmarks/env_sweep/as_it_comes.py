"""Suites without the guards of our adapters: TextArena by its own calls alone, any generator of reasoning-gym."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import textarena

import agentrl_envs.reasoning_gym.env as reasoning_gym
from agentrl_envs.reasoning_gym.env import ReasoningGym


class TextArenaAsItComes(gymnasium.Env[str, str]):
    """A game for one, by `make`, `reset`, `get_observation`, `step` and `close` of TextArena and nothing else.

    Args:
        game: id in TextArena, which gives it the wrapper that it is registered with.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    free_text = True

    def __init__(self, game: str) -> None:
        self._game = textarena.make(game)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._game.reset(num_players=1, seed=seed)
        return self._game.get_observation()[1], {}

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        done, _ = self._game.step(action)
        if not done:
            return self._game.get_observation()[1], 0.0, False, False, {}
        rewards, _ = self._game.close()
        return "The game is over.", rewards[0], True, False, {}


class Unguarded(ReasoningGym):
    """A question of any generator, also of those that the adapter refuses, whose scorer gets every reply."""

    def __init__(self, dataset: str) -> None:
        refused, reasoning_gym.BROKEN = reasoning_gym.BROKEN, {}
        try:
            super().__init__(dataset)
            self._evaluated = False
        finally:
            reasoning_gym.BROKEN = refused
