"""Sokoban as data: levels made by pulling boxes off their targets, moves, and the shortest solution."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

Cell = tuple[int, int]
"""Row and column, from the top left."""

MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

_TRIES = 1000


@dataclass(frozen=True)
class Level:
    """An empty room with boxes, as it is at one time.

    Args:
        size: cells of a side with the walls round it.
        targets: where boxes belong.
        boxes: where they are.
        player: where the player is.
    """

    size: int
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    @property
    def stuck(self) -> bool:
        """Whether a box that is on no target is in a corner, out of which it never comes."""
        ends = (1, self.size - 2)
        return any(row in ends and column in ends for row, column in self.boxes - self.targets)

    def free(self, cell: Cell) -> bool:
        """Return whether a cell is neither wall nor box."""
        inside = all(0 < place < self.size - 1 for place in cell)
        return inside and cell not in self.boxes

    def after(self, action: str) -> "Level":
        """Return the level after an action; one that is not possible changes nothing."""
        there = _beside(self.player, action)
        if there not in self.boxes:
            return replace(self, player=there) if self.free(there) else self
        beyond = _beside(there, action)
        if not self.free(beyond):
            return self
        return replace(self, player=there, boxes=self.boxes - {there} | {beyond})

    def solution(self) -> list[str] | None:
        """Return the shortest actions that solve the level; None if nothing does."""
        found: dict[Level, list[str]] = {self: []}
        queue = deque([self])
        while queue:
            level = queue.popleft()
            if level.solved:
                return found[level]
            for action in MOVES:
                following = level.after(action)
                if following not in found and not following.stuck:
                    found[following] = [*found[level], action]
                    queue.append(following)
        return None


def draw_level(random: np.random.Generator, size: int, boxes: int, pulls: int, longest: int) -> Level:
    """Draw a level that at most `longest` actions solve.

    Boxes begin on their targets and are pulled off: a number of times from 1 up to `pulls`, a box and a direction are
    drawn, and the player, who begins anywhere, pulls where that is possible.

    Args:
        random: draws everything.
        size: cells of a side with the walls.
        boxes: number of boxes.
        pulls: the most tries to pull.
        longest: the most actions of the shortest solution.

    Raises:
        ValueError: no such level has been found.
    """
    inner = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    actions = list(MOVES)
    for _ in range(_TRIES):
        *targets, player = (inner[int(number)] for number in random.choice(len(inner), size=boxes + 1, replace=False))
        level = Level(size, frozenset(targets), frozenset(targets), player)
        for _ in range(int(random.integers(1, pulls + 1))):
            box = sorted(level.boxes)[int(random.integers(boxes))]
            level = _pull(level, box, actions[int(random.integers(len(actions)))])
        solution = level.solution()
        if solution and len(solution) <= longest:
            return level
    raise ValueError(
        f"Of {_TRIES} Sokoban levels of size {size} with {boxes} boxes and up to {pulls} pulls none could be solved in "
        f"{longest} actions; change pulls or max_turns."
    )


def _pull(level: Level, box: Cell, action: str) -> Level:
    """Return the level after the player has walked to a box and pulled it; the same level if that is not possible."""
    near = _beside(box, action)
    far = _beside(near, action)
    if not level.free(far) or near not in _reached(level):
        return level
    return replace(level, boxes=level.boxes - {box} | {near}, player=far)


def _reached(level: Level) -> set[Cell]:
    """Return the cells to which the player can walk without pushing."""
    reached = {level.player}
    queue = deque(reached)
    while queue:
        cell = queue.popleft()
        for action in MOVES:
            there = _beside(cell, action)
            if level.free(there) and there not in reached:
                reached.add(there)
                queue.append(there)
    return reached


def _beside(cell: Cell, action: str) -> Cell:
    return cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]
