"""The Sokoban environment: a room as a grid of symbols, played with four words."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from agentrl_envs.pictures import Colour, draw_grid
from agentrl_envs.sokoban.level import Level, draw_level
from agentrl_envs.text_env import TextEnv
from agentrl_envs.wording import read_wording

_WORDING = read_wording("agentrl_envs.sokoban")
_FLOOR, _TARGET, _PLAYER = (235, 222, 208), (241, 196, 15), (41, 128, 185)
_COLOURS: dict[str, tuple[Colour, Colour | None]] = {
    "#": ((86, 101, 115), None),
    "_": (_FLOOR, None),
    "O": (_TARGET, None),
    "X": (_FLOOR, (147, 81, 22)),
    "*": (_TARGET, (39, 174, 96)),
    "P": (_FLOOR, _PLAYER),
    "S": (_TARGET, _PLAYER),
}


class Sokoban(TextEnv):
    """Push every box onto a target, in an empty room. A box can be pushed and never pulled.

    The symbols: # wall, _ floor, O target, X box, * box on a target, P player, S player on a target.

    Args:
        size: cells of a side with the walls, 5 to 10.
        boxes: number of boxes, 1 to 3.
        pulls: how often it is tried to pull boxes off their targets when a level is made: the number is drawn from 1 up
            to this one, by default 3 * (size - 4). More make harder levels.
        reward: "binary" gives 1 when the last box is on a target; "classic" gives -0.1 in every turn, 1 for a box that
            comes onto a target, -1 for one that leaves it, and 10 for the last.
        max_turns: turns after which an episode is truncated, by default 4 * size - 12 for each box. The shortest
            solution is never longer.
        render_mode: "rgb_array" makes `render` draw the room.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 - declared by gymnasium

    actions = _WORDING.actions
    aliases = _WORDING.aliases
    default_action = _WORDING.default_action

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        pulls: int | None = None,
        reward: Literal["binary", "classic"] = "binary",
        max_turns: int | None = None,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        super().__init__()
        if not 5 <= size <= 10:
            raise ValueError(f"A Sokoban room has a size of 5 to 10, not {size}.")
        if not 1 <= boxes <= 3:
            raise ValueError(f"Sokoban has 1 to 3 boxes, not {boxes}.")
        if pulls is not None and pulls < 1:
            raise ValueError(f"pulls must be at least 1, not {pulls}.")
        if reward not in ("binary", "classic"):
            raise ValueError(f'reward must be "binary" or "classic", not {reward!r}.')
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f'render_mode must be "rgb_array" or None, not {render_mode!r}.')
        self.size = size
        self.boxes = boxes
        self.pulls = 3 * (size - 4) if pulls is None else pulls
        self.reward = reward
        self.max_turns = (4 * size - 12) * boxes if max_turns is None else max_turns
        self.render_mode = render_mode
        self._level = Level(size, frozenset(), frozenset(), (1, 1))  # until the first episode

    @property
    def system_prompt(self) -> str:
        """The symbols and the actions in one line."""
        return _WORDING.system_prompt.format(names=", ".join(self.actions))

    def progression(self) -> float:
        """Return the share of boxes that are on targets."""
        return len(self._level.boxes & self._level.targets) / self.boxes

    def metrics(self) -> dict[str, float]:
        """Return whether a box is in a corner, out of which it never comes."""
        return {"stuck": float(self._level.stuck)}

    def render(self) -> np.ndarray | None:
        """Return the room as RGB [height, width, 3], uint8; None without `render_mode`."""
        return draw_grid(self._rows(), _COLOURS) if self.render_mode == "rgb_array" else None

    def solver(self) -> Callable[[], str]:
        """Return a player that takes the shortest solution; where none is left, it takes the default action."""

        def player() -> str:
            solution = self._level.solution()
            return solution[0] if solution else self.default_action

        return player

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._level = draw_level(self.np_random, self.size, self.boxes, self.pulls, self.max_turns)

    def _act(self, action: str) -> tuple[float, bool]:
        before = len(self._level.boxes & self._level.targets)
        self._level = self._level.after(action)
        solved = self._level.solved
        if self.reward == "binary":
            return float(solved), solved
        return len(self._level.boxes & self._level.targets) - before - 0.1 + 10 * solved, solved

    def _observe(self) -> tuple[str, str]:
        return "\n".join(" ".join(row) for row in self._rows()), ""

    def _rows(self) -> list[list[str]]:
        level = self._level
        rows = [["#"] * level.size for _ in range(level.size)]
        for row in range(1, level.size - 1):
            for column in range(1, level.size - 1):
                cell = row, column
                symbols = "O*S" if cell in level.targets else "_XP"
                rows[row][column] = symbols[1 if cell in level.boxes else 2 if cell == level.player else 0]
        return rows
