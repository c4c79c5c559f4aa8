"""Worlds of cells: moves, search for shortest solutions, and step rewards; all pure functions."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, Self

Cell = tuple[int, int]
"""Row and column of a cell, counted from the top left."""

MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class World(Hashable, Protocol):
    """A state of a game. Equal states have equal futures."""

    @property
    def solved(self) -> bool:
        """Whether the task is done."""

    @property
    def lost(self) -> bool:
        """Whether the task can no longer be done. The value may be false in lost states that are hard to detect."""

    def after(self, action: str) -> Self:
        """Return the state after an action; an impossible action changes nothing."""


@dataclass(frozen=True)
class Way:
    """The shortest solutions from a state.

    Args:
        length: number of actions of each shortest solution.
        first: first actions of all shortest solutions, in the order of `MOVES`; empty if the state is solved.
    """

    length: int
    first: tuple[str, ...]


def beside(cell: Cell, action: str) -> Cell:
    """Return the next cell in the direction of an action."""
    return cell[0] + MOVES[action][0], cell[1] + MOVES[action][1]


def shortest(world: World) -> Way | None:
    """Search breadth first for the shortest solutions of a world; return None if there is no solution."""
    # State at the current distance -> first actions of the shortest paths to this state
    layer: dict[World, set[str]] = {world: set()}
    seen = {world}
    length = 0
    while layer:
        first = [begun for there, begun in layer.items() if there.solved]
        if first:
            return Way(length, tuple(action for action in MOVES if any(action in begun for begun in first)))
        following: dict[World, set[str]] = {}
        for here, begun in layer.items():
            for action in MOVES:
                there = here.after(action)
                if there not in seen and not there.lost:
                    following.setdefault(there, set()).update(begun or {action})
        seen.update(following)
        layer = following
        length += 1
    return None


def step_reward(after: World) -> float:
    """Return 1 for a turn that solves the world, 0 for a turn that loses the world, -0.01 for any other turn."""
    return 1.0 if after.solved else 0.0 if after.lost else -0.01


def potential(world: World, horizon: int) -> float:
    """Return the potential of a state: up to 0.5 near a solved state, less with each further action, 0 at every end.

    With the discount `g` of the training, `g * potential(after) - potential(before)` can be added to each reward
    without changing which policies are best, since the potential is 0 in every state in which episodes terminate.

    Args:
        world: state of the game.
        horizon: distance to a solved state, in actions, from which on the potential is 0.
    """
    way = None if world.solved or world.lost else shortest(world)
    return 0.5 * max(1 - way.length / horizon, 0.0) if way is not None else 0.0
