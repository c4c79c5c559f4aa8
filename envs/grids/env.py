"""Base environment of games on a grid, shown as symbols, as a picture, or both."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from gymnasium import spaces

from agentrl_envs.grids.world import World, potential, shortest, step_reward
from agentrl_envs.pictures import checked_cell_px, draw_grid
from agentrl_envs.text_env import Shown, TextEnv
from agentrl_envs.wording import Wording

_INVALID = -0.05

W = TypeVar("W", bound=World)


class GridEnv(TextEnv, Generic[W]):
    """Base of FrozenLake and Sokoban. A subclass defines the worlds, their symbols, and its own rewards.

    With `reward="steps"` a turn that solves the world pays 1, a turn that loses the world pays 0 and ends the episode,
    and any other turn pays -0.01. A text that names no action costs 0.05, and the next observation reports the executed
    action.
    In training every text names an action, since the trainer maps replies to names; set the trainer's
    `invalid_penalty` instead.

    Args:
        wording: texts of the game; `picture` and `picture_too` describe what a picture shows.
        looks: symbol of a cell -> layers of the cell's picture, bottom first.
        cells: side of the picture in cells.
        reward: "steps", or the name of one of the game's own rewards.
        shaping: discount of the training, above 0 and at most 1; adds potential-based shaping with
            `grids.world.potential` to the rewards.
        observation: content of observations: "text", "image" or "both".
        cell_px: side of a cell in images, in pixels.
        render_mode: "rgb_array" makes `render` draw the world.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - declared by gymnasium

    def __init__(
        self,
        wording: Wording,
        looks: Mapping[str, tuple[str, ...]],
        cells: int,
        reward: str,
        shaping: float | None,
        observation: Shown,
        cell_px: int,
        render_mode: Literal["rgb_array"] | None,
    ) -> None:
        super().__init__()
        if shaping is not None and not (reward == "steps" and 0 < shaping <= 1):
            raise ValueError(
                f'shaping is the discount of the training, above 0 and at most 1, beside reward "steps", not {shaping} '
                f'beside "{reward}".'
            )
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be "rgb_array" or None, not {render_mode!r}.')
        side = cells * checked_cell_px(cell_px)
        self._show(observation, spaces.Box(0, 255, (side, side, 3), np.uint8))
        self.remarks = self.remarks or reward == "steps"
        self.reward = reward
        self.shaping = shaping
        self.cell_px = cell_px
        self.render_mode = render_mode
        self._wording = wording
        self._looks = looks
        self._world: W

    # ---- methods that a game must define -------------------------------------------------------------------------

    def _rows(self) -> list[list[str]]:
        """Return the symbols of the cells, from the top row down."""
        raise NotImplementedError

    def _pay(self, before: W, after: W) -> tuple[float, bool]:
        """Return the game's own reward of a turn, and whether the turn ends the episode."""
        raise NotImplementedError

    # ---- members that all games share ----------------------------------------------------------------------------

    @property
    def system_prompt(self) -> str:
        """Text with the task, the actions, and the meaning of symbols or pictures."""
        says = self._wording.texts
        prompt = says["picture"] if self.observation == "image" else self._wording.system_prompt
        prompt = prompt.format(names=", ".join(self.actions))
        return f"{prompt} {says['picture_too']}" if self.observation == "both" else prompt

    def success(self) -> bool:
        """Return whether the world is solved."""
        return self._world.solved

    def best_actions(self) -> tuple[str, ...]:
        """Return the first actions of all shortest solutions; empty if there is no solution or the world is solved."""
        way = shortest(self._world)
        return () if way is None else way.first

    def solver(self) -> Callable[[], str]:
        """Return a player that follows a shortest solution, or takes the default action if there is no solution."""
        return lambda: next(iter(self.best_actions()), self.default_action)

    def render(self) -> np.ndarray | None:
        """Return the world as RGB [height, width, 3], uint8; None without `render_mode`."""
        return self._draw() if self.render_mode == "rgb_array" else None

    def _act(self, action: str) -> tuple[float, bool]:
        before = self._world
        self._world = after = before.after(action)
        if self.reward != "steps":
            return self._pay(before, after)
        reward = step_reward(after) + _INVALID * self.invalid
        if self.shaping is not None:
            reward += self.shaping * potential(after, self.max_turns) - potential(before, self.max_turns)
        return reward, after.solved or after.lost

    def _observe(self) -> tuple[str, str]:
        return "\n".join(" ".join(row) for row in self._rows()), ""

    def _images(self) -> tuple[np.ndarray, ...]:
        return (self._draw(),)

    def _draw(self) -> np.ndarray:
        return draw_grid(self._rows(), self._looks, self.cell_px)
