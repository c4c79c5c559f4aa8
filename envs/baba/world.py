"""The world of Baba Is AI: cells with stacks, moves, pushes and ends. Worlds are immutable."""

from bisect import insort
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from agentrl_envs.baba.elements import Element, Stack, read_map, write_map
from agentrl_envs.baba.rules import Rules, read_rules

MOVES = {"up": (0, -1), "right": (1, 0), "down": (0, 1), "left": (-1, 0)}

Outcome = Literal["", "win", "lose", "no_you"]
"""How a move ended the game. Empty: the game continues. "no_you": no object is YOU any more."""


@dataclass(frozen=True)
class World:
    """A state of the game.

    Args:
        width: number of cells in a row.
        cells: stacks of all cells, row by row.
        rules: rules in force.
    """

    width: int
    cells: tuple[Stack, ...]
    rules: Rules

    @classmethod
    def of(cls, width: int, cells: tuple[Stack, ...]) -> "World":
        """Return the world with these cells and with the rules that the cells spell."""
        return cls(width, cells, read_rules(width, cells))

    @classmethod
    def read(cls, text: str) -> "World":
        """Return the world of a map in text.

        Raises:
            ValueError: the text is not a valid map.
        """
        return cls.of(*read_map(text))

    def write(self) -> str:
        """Return the map in text."""
        return write_map(self.width, self.cells)

    @cached_property
    def you(self) -> tuple[int, ...]:
        """The cells that have a YOU object on top, row by row."""
        you = self.rules.having["you"]
        return tuple(here for here, stack in enumerate(self.cells) if stack and stack[-1] in you)

    @property
    def viewpoint(self) -> int | None:
        """Cell to which places in texts are relative: the first cell with an object of the last YOU rule."""
        for rule in reversed(self.rules.told):
            if rule.word == "you":
                for here in self.you:
                    if rule.covers(self.cells[here][-1]):
                        return here
        return None

    def place(self, cell: int) -> tuple[int, int]:
        """Return the coordinates of a cell: x to the right, y down, from 0."""
        return cell % self.width, cell // self.width

    def neighbour(self, cell: int, move: str) -> int | None:
        """Return the next cell in the direction of a move; None beyond the map."""
        dx, dy = MOVES[move]
        x, y = cell % self.width + dx, cell // self.width + dy
        inside = 0 <= x < self.width and 0 <= y * self.width < len(self.cells)
        return y * self.width + x if inside else None

    def after(self, move: str) -> tuple["World", Outcome]:
        """Return the world after all YOU objects have moved one step, and whether and how this move ends the game.

        The rules before the move decide whether an object that a YOU object enters is WIN or LOSE; the rules after the
        move decide whether any object is still YOU. A win takes precedence over a loss.
        """
        step = _Step(self, move)
        met = step.take()
        cells = tuple(step.cells)
        rules = read_rules(self.width, cells) if step.words_moved else self.rules
        if rules.becoming:
            cells = tuple((*stack[:-1], rules.becoming.get(stack[-1], stack[-1])) if stack else () for stack in cells)
        world = World(self.width, cells, rules)
        before, you = self.rules.having, {cells[here][-1] for here in world.you}
        outcome: Outcome = ""
        if met & before["win"] or you & rules.having["win"]:
            outcome = "win"
        elif met & before["lose"] or you & rules.having["lose"]:
            outcome = "lose"
        elif not you:
            outcome = "no_you"
        return world, outcome


class _Step:
    """One step of all YOU objects, on a copy of the cells."""

    def __init__(self, world: World, move: str) -> None:
        self.world = world
        self.move = move
        self.having = world.rules.having
        self.cells = list(world.cells)
        self.words_moved = False
        self._moved: set[tuple[int, int]] = set()  # cell and height of each element that has moved in this step
        self._to_visit = list(world.you)
        self._visited = -1

    def take(self) -> set[Element]:
        """Move each YOU object once, row by row; return all entered elements and all stopped YOU objects."""
        met = set()
        for here in self._to_visit:  # this list grows if a push uncovers another YOU object
            self._visited = here
            stack = self.cells[here]
            if stack and stack[-1] in self.having["you"] and (here, len(stack)) not in self._moved:
                top = self._push(here)
                if top is not None:
                    met.add(top)
        return met

    def _push(self, here: int) -> Element | None:
        """Push the element ahead, then move the top of a cell; return the entered element, or the top if stopped."""
        cells = self.cells
        ahead = self.world.neighbour(here, self.move)
        if ahead is not None and cells[ahead] and (cells[ahead][-1].is_text or cells[ahead][-1] in self.having["push"]):
            self._push(ahead)
        mover = cells[here][-1]
        if ahead is None or not self._may_enter(ahead):
            return mover
        met = cells[ahead][-1] if cells[ahead] else None
        cells[here] = cells[here][:-1]
        cells[ahead] = (*cells[ahead], mover)
        self._moved.add((ahead, len(cells[ahead])))
        self.words_moved |= mover.is_text
        if cells[here]:
            self._bare(here)
        return met

    def _bare(self, cell: int) -> None:
        """Note the element that a push uncovered: a text block changes the rules, a YOU object still has to move."""
        top = self.cells[cell][-1]
        self.words_moved |= top.is_text
        if top in self.having["you"] and cell > self._visited and cell not in self._to_visit:
            insort(self._to_visit, cell)

    def _may_enter(self, cell: int) -> bool:
        stack = self.cells[cell]
        return not stack or (stack[-1].kind == "obj" and stack[-1] not in self.having["stop"])
