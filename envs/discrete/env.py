"""Adapter of gymnasium environments with discrete actions, with a function that describes observations in words."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl_envs.text_env import TextEnv
from agentrl_envs.tools import find_function

Describe = Callable[[Any], str]


class Discrete(TextEnv):
    """Adapter of a gymnasium environment: a text for each observation and a name for each action.

    Rewards, ends and pictures come from the inner environment. Both its time limit and `max_turns` truncate.

    Args:
        game: inner environment: an id for `gymnasium.make`, or `module:Class` for a class that is created without
            wrappers.
        describe: function from an observation to its text, as `module:function`; in Python also a function object.
        actions: names of the actions in the order of the action ids; or a dictionary from names to descriptions.
        system_prompt: rules and task. The prompt lists the actions with descriptions below this text.
        default_action: action that is executed if a reply names no action; the first action by default.
        aliases: other name of an action, in lower case -> action name.
        max_turns: turns after which an episode is truncated; by default the registered limit of the inner environment.
        solved_at: smallest return of a success; a value of 0 or less is compared at the end of the episode. By default
            `info["success"]` or `info["is_success"]` of the inner environment decides, and without them an episode
            that terminates with a positive reward is a success. Set `solved_at` for games that end with a failure,
            such as CartPole.
        game_kwargs: arguments of the inner environment.
        render_mode: render mode of the inner environment; None means the default render mode.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - declared by gymnasium

    def __init__(
        self,
        game: str,
        describe: str | Describe,
        actions: Sequence[str] | Mapping[str, str],
        system_prompt: str = "",
        default_action: str | None = None,
        aliases: Mapping[str, str] | None = None,
        max_turns: int | None = None,
        solved_at: float | None = None,
        game_kwargs: Mapping[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(actions, str) or not isinstance(actions, Sequence | Mapping):
            raise ValueError(f"actions must be a list of names, or names and descriptions, not {actions!r}.")
        if others := [name for name in actions if not isinstance(name, str)]:  # YAML reads yes, no and on as booleans
            raise ValueError(f"Names of actions must be texts, not {others}; put them in quotes.")
        if solved_at is not None and math.isnan(solved_at):
            raise ValueError(f"solved_at must be a number or None, not {solved_at}.")
        self._describe = find_function(describe, "describe") if isinstance(describe, str) else describe
        self._inner = _make(game, dict(game_kwargs or {}) | ({"render_mode": render_mode} if render_mode else {}))
        self._first = _first_action(game, self._inner.action_space, len(actions))
        self.actions = actions if isinstance(actions, Mapping) else dict.fromkeys(actions, "")
        if len(self.actions) < len(actions):
            raise ValueError(f"The actions {list(actions)} have a name twice.")
        self.aliases = aliases or {}
        self.default_action = next(iter(self.actions)) if default_action is None else default_action
        if max_turns is None:
            max_turns = self._inner.spec.max_episode_steps if self._inner.spec is not None else None
        if max_turns is None:
            raise ValueError(f"{game} is registered without a limit of turns; give max_turns.")
        self.max_turns = max_turns
        self.solved_at = solved_at
        self.render_mode = render_mode
        self._prompt = system_prompt
        self._observation: Any = None
        self._return = 0.0
        self._truncated = False
        self._says: bool | None = None  # success as reported by the inner environment

    @property
    def system_prompt(self) -> str:
        """System prompt, as given in the argument `system_prompt`."""
        return self._prompt

    def cut_off(self) -> bool:
        """Return whether the inner environment truncates the episode."""
        return self._truncated

    def success(self) -> bool:
        """Return whether the episode is solved; see `solved_at`."""
        if self.solved_at is not None:
            reached = self._return >= self.solved_at
            # If `solved_at` is 0 or less, later negative rewards may undo a success, so wait for the episode's end.
            return reached and (self.solved_at > 0 or not self._active)
        return super().success() if self._says is None else self._says

    def render(self) -> Any:
        """Return the picture that the inner environment draws; None without `render_mode`."""
        return None if self.render_mode is None else self._inner.render()

    def close(self) -> None:
        """Close the inner environment."""
        self._inner.close()

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        own = int(self.np_random.integers(2**31)) if seed is None else seed
        self._observation, info = self._inner.reset(seed=own, options=options)
        self._return, self._truncated, self._says = 0.0, False, _success(info)

    def _act(self, action: str) -> tuple[float, bool]:
        number = self._first + list(self.actions).index(action)
        self._observation, reward, terminated, truncated, info = self._inner.step(number)
        self._return += float(reward)
        self._truncated, self._says = bool(truncated), _success(info)
        return float(reward), bool(terminated)

    def _observe(self) -> tuple[str, str]:
        text = self._describe(self._observation)
        if not isinstance(text, str):
            raise TypeError(f"describe returned {text!r} for an observation; it must return a text.")
        return text, ""


def _make(game: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    module, _, name = game.rpartition(":")
    try:
        found = getattr(import_module(module), name, None) if module else None
        if isinstance(found, type) and issubclass(found, gymnasium.Env):
            return found(**kwargs)
        return gymnasium.make(game, disable_env_checker=True, **kwargs)
    except Exception as error:  # third-party code may raise anything
        why = error if isinstance(error, gymnasium.error.Error | ImportError | TypeError | ValueError) else repr(error)
        raise ValueError(f"The game {game!r} with arguments {kwargs} cannot be created: {why}") from error


def _first_action(game: str, space: Any, names: int) -> int:
    """Return the id of the first action.

    Raises:
        ValueError: the actions are not discrete, or there are too few or too many names.
    """
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"{game} has the actions {space}; only those of a Discrete space can be named.")
    if names != space.n:
        raise ValueError(f"{game} has {space.n} actions, and {names} names were given.")
    return int(space.start)


def _success(info: Mapping[str, Any]) -> bool | None:
    said = info.get("success", info.get("is_success"))
    return None if said is None else bool(said)
