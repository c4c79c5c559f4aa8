"""Lakes as data: random maps with a way to the goal, and the way."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

Cell = tuple[int, int]
"""Row and column, from the top left."""

MOVES: dict[str, Cell] = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}

_TRIES = 1000


@dataclass(frozen=True)
class Lake:
    """A square of ice with holes.

    Args:
        size: cells of a side.
        holes: cells that end the game.
        start: where the player begins.
        goal: where the player wants to go.
    """

    size: int
    holes: frozenset[Cell]
    start: Cell
    goal: Cell

    def after(self, cell: Cell, action: str) -> Cell:
        """Return where an action leads; the edge of the lake holds the player back."""
        row, column = cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    def way(self, cell: Cell) -> list[str] | None:
        """Return the shortest actions from a cell to the goal, past the holes; None if there is no way."""
        ways: dict[Cell, list[str]] = {cell: []}
        queue = deque([cell])
        while queue:
            here = queue.popleft()
            if here == self.goal:
                return ways[here]
            for action in MOVES:
                there = self.after(here, action)
                if there not in ways and there not in self.holes:
                    ways[there] = [*ways[here], action]
                    queue.append(there)
        return None


def draw_lake(
    random: np.random.Generator, size: int, frozen: float, placement: Literal["corners", "random"], longest: int
) -> Lake:
    """Draw a lake with a way of at most `longest` actions from the start to the goal.

    Args:
        random: draws everything.
        size: cells of a side.
        frozen: probability that a cell other than start and goal is ice.
        placement: where start and goal are: in opposite "corners", or anywhere.
        longest: the most actions of the shortest way.

    Raises:
        ValueError: no such lake has been found.
    """
    cells = [(row, column) for row in range(size) for column in range(size)]
    for _ in range(_TRIES):
        start, goal = cells[0], cells[-1]
        if placement == "random":
            start, goal = (cells[int(number)] for number in random.choice(len(cells), size=2, replace=False))
        solid = random.random(len(cells)) < frozen
        lake = Lake(size, _holes(cells, solid, (start, goal)), start, goal)
        way = lake.way(start)
        if way is not None and len(way) <= longest:
            return lake
    raise ValueError(
        f"In {_TRIES} lakes of size {size} with a share of ice of {frozen} none had a way of at most {longest} "
        "actions; raise frozen or max_turns."
    )


def _holes(cells: list[Cell], solid: np.ndarray, kept: Collection[Cell]) -> frozenset[Cell]:
    return frozenset(cell for cell, ice in zip(cells, solid, strict=True) if not ice and cell not in kept)
