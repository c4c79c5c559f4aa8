"""A wrapper that adds the action of an environment's scripted player to each info, for cloning.

Environment processes import this file, so it imports only gymnasium and the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from lightning_agentrl.errors.problem import ConfigError

EXPERT_ACTION = "expert_action"  # key of info; None once the episode is over


class ExpertActions(gymnasium.Wrapper):
    """Add the next action of the environment's ``solver`` to each info.

    ``solver()`` is called after each reset. It returns a function that gives the name of the next action, or None if
    there is no scripted player.

    Args:
        env: the environment.
        name: its id, for errors.
    """

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        super().__init__(env)
        self.name = name
        self._player: Callable[[], Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        solver = self.env.get_wrapper_attr("solver") if self.env.has_wrapper_attr("solver") else lambda: None
        self._player = self._ask(solver, seed)
        if self._player is None:
            raise ConfigError(
                f"the environment '{self.name}' has no scripted player (a method `solver` that returns a function, "
                "which gives the next action); clone recorded runs instead, or another environment"
            )
        self._seed = seed
        return observation, {**info, EXPERT_ACTION: self._action()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        over = bool(terminated) or bool(truncated)
        return observation, reward, terminated, truncated, {**info, EXPERT_ACTION: None if over else self._action()}

    def _action(self) -> str:
        assert self._player is not None
        action = self._ask(self._player, self._seed)
        if not isinstance(action, str):
            raise ConfigError(
                f"the scripted player of '{self.name}' gave {action!r} in the episode with seed {self._seed}; it must "
                "give an action as text"
            )
        return action

    def _ask(self, call: Callable[[], Any], seed: int | None) -> Any:
        try:
            return call()
        except Exception as error:
            raise ConfigError(
                f"the scripted player of '{self.name}' failed in the episode with seed {seed}: "
                f"{type(error).__name__}: {error}; it must go on from any state, or recorded runs can be cloned instead"
            ) from error
