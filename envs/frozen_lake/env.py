"""The FrozenLake environment: a lake as a grid of symbols, walked with four words."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from agentrl_envs.frozen_lake.lake import MOVES, Lake, draw_lake
from agentrl_envs.pictures import Colour, draw_grid
from agentrl_envs.text_env import TextEnv
from agentrl_envs.wording import read_wording

_WORDING = read_wording("agentrl_envs.frozen_lake")
_ICE, _PLAYER = (214, 234, 248), (192, 57, 43)
_COLOURS: dict[str, tuple[Colour, Colour | None]] = {
    "_": (_ICE, None),
    "O": (_ICE, (33, 47, 60)),
    "G": (_ICE, (39, 174, 96)),
    "P": (_ICE, _PLAYER),
    "X": ((33, 47, 60), _PLAYER),
    "*": ((39, 174, 96), _PLAYER),
}


class FrozenLake(TextEnv):
    """Walk to the goal (reward 1) without falling into a hole (reward 0, the end). Nothing slips.

    The symbols: P player, _ ice, O hole, G goal; at the end X is the player in a hole and * the player on the goal.

    Args:
        size: cells of a side, 2 to 16.
        frozen: probability that a cell is ice and no hole, above 0 and at most 1. Lakes without a way to the goal are
            drawn again.
        placement: where start and goal are: in opposite "corners", or anywhere ("random").
        max_turns: turns after which an episode is truncated; by default 4 * size, and with random places 4 * size - 6
            (at least 2). The shortest way is never longer.
        render_mode: "rgb_array" makes `render` draw the lake.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - declared by gymnasium

    actions = _WORDING.actions
    aliases = _WORDING.aliases
    default_action = _WORDING.default_action

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        placement: Literal["corners", "random"] = "corners",
        max_turns: int | None = None,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        super().__init__()
        if not 2 <= size <= 16:
            raise ValueError(f"A lake has a size of 2 to 16, not {size}.")
        if not 0 < frozen <= 1:
            raise ValueError(f"frozen must be above 0 and at most 1, not {frozen}.")
        if placement not in ("corners", "random"):
            raise ValueError(f'placement must be "corners" or "random", not {placement!r}.')
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be "rgb_array" or None, not {render_mode!r}.')
        self.size = size
        self.frozen = frozen
        self.placement: Literal["corners", "random"] = placement
        self.render_mode = render_mode
        usual = 4 * size if placement == "corners" else max(4 * size - 6, 2)
        self.max_turns = usual if max_turns is None else max_turns
        self._lake = Lake(size, frozenset(), start=(0, 0), goal=(size - 1, size - 1))  # until the first episode
        self._cell = self._lake.start

    @property
    def system_prompt(self) -> str:
        """The symbols and the actions in one line."""
        return _WORDING.system_prompt.format(names=", ".join(self.actions))

    def render(self) -> np.ndarray | None:
        """Return the lake as RGB [height, width, 3], uint8; None without `render_mode`."""
        return draw_grid(self._rows(), _COLOURS) if self.render_mode == "rgb_array" else None

    def solver(self) -> Callable[[], str]:
        """Return a player that takes the shortest way."""

        def player() -> str:
            way = self._lake.way(self._cell)
            return way[0] if way else next(iter(MOVES))  # at the goal and in a hole nothing counts any more

        return player

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._lake = draw_lake(self.np_random, self.size, self.frozen, self.placement, self.max_turns)
        self._cell = self._lake.start

    def _act(self, action: str) -> tuple[float, bool]:
        self._cell = self._lake.after(self._cell, action)
        won = self._cell == self._lake.goal
        return float(won), won or self._cell in self._lake.holes

    def _observe(self) -> tuple[str, str]:
        return "\n".join(" ".join(row) for row in self._rows()), ""

    def _rows(self) -> list[list[str]]:
        rows = [["_"] * self.size for _ in range(self.size)]
        for row, column in self._lake.holes:
            rows[row][column] = "O"
        goal, (row, column) = self._lake.goal, self._cell
        rows[goal[0]][goal[1]] = "G"
        rows[row][column] = {"O": "X", "G": "*"}.get(rows[row][column], "P")
        return rows
