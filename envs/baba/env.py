"""The environment Baba Is AI: a level or a user's map, described in words."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from agentrl_envs.baba.levels import LEVELS
from agentrl_envs.baba.render import draw
from agentrl_envs.baba.solver import player
from agentrl_envs.baba.text import active_rules, describe
from agentrl_envs.baba.world import MOVES, Outcome, World
from agentrl_envs.picture_space import PictureSpace
from agentrl_envs.pictures import checked_cell_px
from agentrl_envs.text_env import Shown, TextEnv
from agentrl_envs.wording import read_wording

_WORDING = read_wording("agentrl_envs.baba")
_MOST_PX = 2**16  # largest side of a picture, in pixels
_LEVEL = "goto_win"  # default level


class BabaIsAIEnv(TextEnv):
    """Push blocks of text so that the rules let you win.

    Args:
        level: name of a level, a key of `LEVELS`; the default is `goto_win` if no map is given.
        map: text of a map in place of a level: one line per row, spaces between cells; a cell is a dot or its
            elements, bottom first, joined by `+`, such as `obj:wall+obj:key:red`.
        reward: "binary" gives 1 for a win and 0 otherwise; "native" gives 1 - 0.9 * turns / max_turns for a win, -1
            for a loss and 0 otherwise.
        max_turns: turns after which an episode is truncated.
        observation: content of observations: "text", "image" (the map) or "both".
        cell_px: side of a cell in images, in pixels, 8 to 128; words are legible from 28 pixels on.
        render_mode: "rgb_array" makes `render` draw the map.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - declared by gymnasium
    max_chars = 131_072  # enough for the text of the largest map, full of blocks

    default_action = _WORDING.default_action

    def __init__(
        self,
        level: str | None = None,
        map: str | None = None,
        reward: Literal["binary", "native"] = "binary",
        max_turns: int = 100,
        observation: Shown = "text",
        cell_px: int = 32,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        super().__init__()
        if level is not None and map is not None:
            raise ValueError(f"Baba Is AI plays a level or a map, not both: give level {level!r} or a map.")
        if level is not None and level not in tuple(LEVELS):
            raise ValueError(f"Unknown Baba Is AI level {level!r}; the levels are {', '.join(LEVELS)}.")
        if reward not in ("binary", "native"):
            raise ValueError(f'reward must be "binary" or "native", not {reward!r}.')
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be "rgb_array" or None, not {render_mode!r}.')
        self.cell_px = checked_cell_px(cell_px)
        self._show(observation, PictureSpace(_MOST_PX))
        self.actions = dict(_WORDING.actions)
        self.aliases = dict(_WORDING.aliases)
        self.level = None if map is not None else level or _LEVEL
        self.reward = reward
        self.max_turns = max_turns
        self.render_mode = render_mode
        self._first = None if map is None else World.read(map)
        if self._first is not None and not self._first.you:
            raise ValueError("Nobody can play this map: no rule on it makes one of its objects YOU.")
        self._world: World
        self._outcome: Outcome = ""

    @property
    def tips(self) -> str:
        """Hints, one per line."""
        return _WORDING.texts["tips"]

    @property
    def system_prompt(self) -> str:
        """Text with the rules, the actions and some hints; all episodes have the same text."""
        listed = "\n".join(f"- {name}: {description}" for name, description in self.actions.items())
        prompt = _WORDING.system_prompt.format(actions=listed, tips=self.tips)
        return prompt if self.observation == "text" else f"{prompt}\n{_WORDING.texts['picture']}"

    def render(self) -> np.ndarray | None:
        """Return the map as RGB [height, width, 3], uint8; None without `render_mode`."""
        return draw(self._world) if self.render_mode == "rgb_array" else None

    def solver(self) -> Callable[[], str]:
        """Return a player that follows the shortest solution, found by a search, or idles if there is no solution."""
        return player(lambda: self._world)

    def extra_info(self) -> dict[str, Any]:
        """Return the rules as in observations, the map, and whether the episode ended because nothing is YOU."""
        return {
            "rules": active_rules(self._world),
            "map": self._world.write(),
            "no_you": self._outcome == "no_you",
        }

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._world = self._first or LEVELS[self.level or _LEVEL](self.np_random)
        self._outcome = ""

    def _act(self, action: str) -> tuple[float, bool]:
        if action not in MOVES:
            return 0.0, False
        self._world, self._outcome = self._world.after(action)
        reward = float(self._outcome == "win")
        if self.reward == "native":
            reward *= 1 - 0.9 * (self.turn + 1) / self.max_turns
            reward -= self._outcome == "lose"
        return reward, bool(self._outcome)

    def _images(self) -> tuple[np.ndarray, ...]:
        return (draw(self._world, self.cell_px),)

    def _observe(self) -> tuple[str, str]:
        return describe(self._world), ""
