"""Lakes as data: random maps with a path to the goal, and moves."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from agentrl_envs.grids.world import Cell, beside, shortest

Placement = Literal["corners", "random"]

_TRIES = 1000


@dataclass(frozen=True)
class Lake:
    """State of a game on a square lake of ice with holes.

    Args:
        size: side of the lake in cells.
        holes: cells with holes, which end the game.
        goal: cell of the goal.
        player: cell of the player.
    """

    size: int
    holes: frozenset[Cell]
    goal: Cell
    player: Cell

    @property
    def solved(self) -> bool:
        return self.player == self.goal

    @property
    def lost(self) -> bool:
        """Whether the player is in a hole."""
        return self.player in self.holes

    def after(self, action: str) -> "Lake":
        """Return the lake after an action; a move off the edge changes nothing."""
        there = beside(self.player, action)
        return replace(self, player=there) if all(0 <= place < self.size for place in there) else self


def draw_lake(
    random: np.random.Generator,
    size: int,
    frozen: float,
    placement: Placement,
    longest: int,
    holes: tuple[int, int] | None = None,
    least: int = 1,
) -> Lake:
    """Draw a lake whose shortest path from the start to the goal has `least` to `longest` actions.

    Args:
        random: random generator.
        size: side of the lake in cells.
        frozen: probability that a cell other than start and goal is ice.
        placement: places of start and goal: opposite "corners", or "random".
        longest: largest length of the shortest path, in actions.
        holes: smallest and largest number of holes, drawn uniformly; replaces `frozen`.
        least: smallest length of the shortest path, in actions.

    Raises:
        ValueError: no lake with these settings was found.
    """
    cells = [(row, column) for row in range(size) for column in range(size)]
    for _ in range(_TRIES):
        start, goal = cells[0], cells[-1]
        if placement == "random":
            start, goal = (cells[int(number)] for number in random.choice(len(cells), size=2, replace=False))
        if holes is None:
            solid = random.random(len(cells)) < frozen
            drawn = _holes(cells, solid, (start, goal))
        else:
            others = [cell for cell in cells if cell not in (start, goal)]
            count = int(random.integers(holes[0], holes[1] + 1))
            drawn = frozenset(others[int(number)] for number in random.choice(len(others), size=count, replace=False))
        lake = Lake(size, drawn, goal, start)
        way = shortest(lake)
        if way is not None and least <= way.length <= longest:
            return lake
    given = f"a share of ice of {frozen}" if holes is None else f"{holes[0]} to {holes[1]} holes"
    raise ValueError(
        f"In {_TRIES} lakes of size {size} with {given} none had a shortest path of {least} to {longest} actions; "
        "use more ice, lower min_way or raise max_turns."
    )


def _holes(cells: list[Cell], solid: np.ndarray, kept: Collection[Cell]) -> frozenset[Cell]:
    return frozenset(cell for cell, ice in zip(cells, solid, strict=True) if not ice and cell not in kept)
