"""The Sokoban environment: a room as a grid of symbols, with four actions."""

from typing import Any, Literal

from agentrl_envs.grids.env import GridEnv
from agentrl_envs.sokoban.level import Level, draw_level
from agentrl_envs.text_env import Shown
from agentrl_envs.wording import read_wording

_WORDING = read_wording("agentrl_envs.sokoban")
_MOST_PULLS = 10_000  # limits the time to generate a level to a quarter of a second
_LOOKS: dict[str, tuple[str, ...]] = {
    "#": ("wall",),
    "_": ("floor",),
    "O": ("floor", "target"),
    "X": ("floor", "crate"),
    "*": ("floor", "target", "crate in place"),
    "P": ("floor", "player"),
    "S": ("floor", "target", "player"),
}


class Sokoban(GridEnv[Level]):
    """Push every box onto a target, in an empty room. A box can be pushed and never pulled.

    The symbols: # wall, _ floor, O target, X box, * box on a target, P player, S player on a target.

    Args:
        size: side of the room in cells, including walls, 5 to 10.
        boxes: number of boxes, 1 to 3.
        pulls: largest number of attempts to pull a box off its target when a level is generated; each level
            draws a number from 1 to `pulls`. By default 3 * (size - 4), at most 10,000; more pulls make harder levels.
        reward: "binary" gives 1 when the last box is on a target; "classic" gives -0.1 in every turn, 1 for a box that
            is pushed onto a target, -1 for a box that is pushed off a target, and 10 for the last box; "steps" gives 1
            for the last box, 0 (and ends the episode) when a box can no longer reach a target, -0.01 in any other turn,
            and 0.05 less for a text that names no action.
        max_turns: turns after which an episode is truncated, by default 4 * size - 12 for each box. The shortest
            solution never has more actions than that.
        shaping: discount of the training; with reward "steps", a value adds potential-based shaping, which rewards each
            turn that comes nearer to the solution.
        observation: content of observations: "text", "image" or "both".
        cell_px: side of a cell in images, in pixels, 8 to 128.
        render_mode: "rgb_array" makes `render` draw the room.
    """

    actions = _WORDING.actions
    aliases = _WORDING.aliases
    default_action = _WORDING.default_action

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        pulls: int | None = None,
        reward: Literal["binary", "classic", "steps"] = "binary",
        max_turns: int | None = None,
        shaping: float | None = None,
        observation: Shown = "text",
        cell_px: int = 32,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        if not 5 <= size <= 10:
            raise ValueError(f"A Sokoban room has a size of 5 to 10, not {size}.")
        if not 1 <= boxes <= 3:
            raise ValueError(f"Sokoban has 1 to 3 boxes, not {boxes}.")
        if pulls is not None and not 1 <= pulls <= _MOST_PULLS:
            raise ValueError(f"pulls must be 1 to {_MOST_PULLS}, not {pulls}.")
        if reward not in ("binary", "classic", "steps"):
            raise ValueError(f'reward must be "binary", "classic" or "steps", not {reward!r}.')
        super().__init__(_WORDING, _LOOKS, size, reward, shaping, observation, cell_px, render_mode)
        self.size = size
        self.boxes = boxes
        self.pulls = 3 * (size - 4) if pulls is None else pulls
        self.max_turns = (4 * size - 12) * boxes if max_turns is None else max_turns
        self._world = Level(size, frozenset(), frozenset(), (1, 1))  # placeholder until the first episode

    def progression(self) -> float:
        """Return the share of boxes that are on targets."""
        return len(self._world.boxes & self._world.targets) / self.boxes

    def metrics(self) -> dict[str, float]:
        """Return whether a box can no longer reach a target."""
        return {"stuck": float(self._world.lost)}

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._world = draw_level(self.np_random, self.size, self.boxes, self.pulls, self.max_turns)

    def _pay(self, before: Level, after: Level) -> tuple[float, bool]:
        if self.reward == "binary":
            return float(after.solved), after.solved
        placed = len(after.boxes & after.targets) - len(before.boxes & before.targets)
        return placed - 0.1 + 10 * after.solved, after.solved

    def _rows(self) -> list[list[str]]:
        level = self._world
        rows = [["#"] * level.size for _ in range(level.size)]
        for row in range(1, level.size - 1):
            for column in range(1, level.size - 1):
                cell = row, column
                symbols = "O*S" if cell in level.targets else "_XP"
                rows[row][column] = symbols[1 if cell in level.boxes else 2 if cell == level.player else 0]
        return rows
