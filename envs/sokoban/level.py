"""Sokoban as data: levels made by pulling boxes off their targets, and moves."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from agentrl_envs.grids.world import MOVES, Cell, beside, shortest

_TRIES = 1000


@dataclass(frozen=True)
class Level:
    """State of a game in an empty room with boxes.

    Args:
        size: side of the room in cells, including walls.
        targets: cells of the targets.
        boxes: cells of the boxes.
        player: cell of the player.
    """

    size: int
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets

    @property
    def lost(self) -> bool:
        """Whether a box can no longer reach a target, since it is in a corner or at a wall with too few targets."""
        ends = (1, self.size - 2)
        if any(row in ends and column in ends for row, column in self.boxes - self.targets):
            return True
        walls = [(axis, end) for axis in (0, 1) for end in ends]
        return any(
            sum(box[axis] == end for box in self.boxes) > sum(target[axis] == end for target in self.targets)
            for axis, end in walls
        )

    def free(self, cell: Cell) -> bool:
        """Return whether a cell is neither wall nor box."""
        inside = all(0 < place < self.size - 1 for place in cell)
        return inside and cell not in self.boxes

    def after(self, action: str) -> "Level":
        """Return the level after an action; an impossible action changes nothing."""
        there = beside(self.player, action)
        if there not in self.boxes:
            return replace(self, player=there) if self.free(there) else self
        beyond = beside(there, action)
        if not self.free(beyond):
            return self
        return replace(self, player=there, boxes=self.boxes - {there} | {beyond})


def draw_level(random: np.random.Generator, size: int, boxes: int, pulls: int, longest: int) -> Level:
    """Draw a level that can be solved with at most `longest` actions.

    The boxes begin on their targets and the player anywhere. Then, 1 to `pulls` times, a box and a direction are drawn,
    and the player pulls the box if the pull is possible.

    Args:
        random: random generator.
        size: side of the room in cells, including walls.
        boxes: number of boxes.
        pulls: largest number of attempts to pull.
        longest: largest length of the shortest solution, in actions.

    Raises:
        ValueError: no level with these settings was found.
    """
    inner = [(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    actions = list(MOVES)
    for _ in range(_TRIES):
        *targets, player = (inner[int(number)] for number in random.choice(len(inner), size=boxes + 1, replace=False))
        level = Level(size, frozenset(targets), frozenset(targets), player)
        for _ in range(int(random.integers(1, pulls + 1))):
            box = sorted(level.boxes)[int(random.integers(boxes))]
            level = _pull(level, box, actions[int(random.integers(len(actions)))])
        way = shortest(level)
        if way is not None and 0 < way.length <= longest:
            return level
    raise ValueError(
        f"Of {_TRIES} Sokoban levels of size {size} with {boxes} boxes and up to {pulls} pulls none could be solved in "
        f"{longest} actions; change pulls or max_turns."
    )


def _pull(level: Level, box: Cell, action: str) -> Level:
    """Return the level after the player walked to a box and pulled it; the same level if no pull is possible."""
    near = beside(box, action)
    far = beside(near, action)
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
            there = beside(cell, action)
            if level.free(there) and there not in reached:
                reached.add(there)
                queue.append(there)
    return reached
