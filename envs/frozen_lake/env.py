"""The FrozenLake environment: a grid of ice and holes with four actions."""

from collections.abc import Sequence
from typing import Any, Literal

from agentrl_envs.frozen_lake.lake import Lake, Placement, draw_lake
from agentrl_envs.grids.env import GridEnv
from agentrl_envs.text_env import Shown
from agentrl_envs.wording import read_wording

_WORDING = read_wording("agentrl_envs.frozen_lake")
_LOOKS: dict[str, tuple[str, ...]] = {
    "_": ("ice",),
    "O": ("ice", "hole"),
    "G": ("ice", "goal"),
    "P": ("ice", "player"),
    "X": ("ice", "hole", "player in a hole"),
    "*": ("ice", "goal", "player"),
}


class FrozenLake(GridEnv[Lake]):
    """Walk to the goal without falling into a hole, which ends the episode. Moves never slip.

    Symbols: P player, _ ice, O hole, G goal; at the end X is the player in a hole and * the player on the goal.

    Args:
        size: side of the lake in cells, 2 to 16.
        frozen: probability that a cell is ice and not a hole, above 0 and at most 1. Lakes without a path to the goal
            are drawn again.
        placement: places of start and goal: opposite "corners", or "random".
        max_turns: turns after which an episode is truncated; by default 4 * size, and with random places 4 * size - 6
            (at least 2). The shortest path never has more actions than that.
        holes: smallest and largest number of holes, such as [2, 4]; replaces `frozen`.
        min_way: smallest length of the shortest path, in actions.
        reward: "binary" gives 1 at the goal and 0 elsewhere; "steps" gives 1 at the goal, 0 in a hole, -0.01 in any
            other turn, and 0.05 less for a text that names no action.
        shaping: discount of the training; with reward "steps", a value adds potential-based shaping, which rewards each
            turn that comes nearer to the goal.
        observation: content of observations: "text", "image" or "both".
        cell_px: side of a cell in images, in pixels, 8 to 128.
        render_mode: "rgb_array" makes `render` draw the lake.
    """

    actions = _WORDING.actions
    aliases = _WORDING.aliases
    default_action = _WORDING.default_action

    def __init__(
        self,
        size: int = 4,
        frozen: float = 0.8,
        placement: Placement = "corners",
        max_turns: int | None = None,
        holes: Sequence[int] | None = None,
        min_way: int = 1,
        reward: Literal["binary", "steps"] = "binary",
        shaping: float | None = None,
        observation: Shown = "text",
        cell_px: int = 32,
        render_mode: Literal["rgb_array"] | None = None,
    ) -> None:
        if not 2 <= size <= 16:
            raise ValueError(f"A lake has a size of 2 to 16, not {size}.")
        if not 0 < frozen <= 1:
            raise ValueError(f"frozen must be above 0 and at most 1, not {frozen}.")
        if holes is not None and not (len(holes) == 2 and 0 <= holes[0] <= holes[1] <= size * size - 2):
            raise ValueError(
                f"holes must be the fewest and the most, from 0 to {size * size - 2} for size {size}, not {holes!r}."
            )
        if placement not in ("corners", "random"):
            raise ValueError(f'placement must be "corners" or "random", not {placement!r}.')
        if reward not in ("binary", "steps"):
            raise ValueError(f'reward must be "binary" or "steps", not {reward!r}.')
        super().__init__(_WORDING, _LOOKS, size, reward, shaping, observation, cell_px, render_mode)
        self.size = size
        self.frozen = frozen
        self.holes = None if holes is None else (holes[0], holes[1])
        self.min_way = min_way
        self.placement: Placement = placement
        usual = 4 * size if placement == "corners" else max(4 * size - 6, 2)
        self.max_turns = usual if max_turns is None else max_turns
        if min_way > self.max_turns >= 1:
            raise ValueError(f"min_way must be at most max_turns ({self.max_turns}), but min_way is {min_way}.")
        self._world = Lake(size, frozenset(), (size - 1, size - 1), (0, 0))  # placeholder until the first episode

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._world = draw_lake(
            self.np_random, self.size, self.frozen, self.placement, self.max_turns, self.holes, self.min_way
        )

    def _pay(self, before: Lake, after: Lake) -> tuple[float, bool]:
        return float(after.solved), after.solved or after.lost

    def _rows(self) -> list[list[str]]:
        lake = self._world
        rows = [["_"] * lake.size for _ in range(lake.size)]
        for row, column in lake.holes:
            rows[row][column] = "O"
        goal, (row, column) = lake.goal, lake.player
        rows[goal[0]][goal[1]] = "G"
        rows[row][column] = {"O": "X", "G": "*"}.get(rows[row][column], "P")
        return rows
