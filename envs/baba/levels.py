"""The forty levels of Baba Is AI and a tiny level, filled at random."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from agentrl_envs.baba.elements import BORDER, COLOURS, IS, NOUNS, Element, thing
from agentrl_envs.baba.world import World

Cell = tuple[int, int]

# Levels are drawn from these objects and colours. Keep the order of both lists, so that each seed keeps its level.
_CAST = ("ball", "key", "door")
_CAST_COLOURS = ("red", "blue", "green")

# Cells from which a block cannot be pushed into the place that completes the winning rule. A cell that is listed twice
# is drawn twice as often.
_ASIDE = (
    *((x, 6) for x in (4, 5, 6)),
    *((x, 1) for x in (4, 5, 6)),
    *((6, y) for y in range(1, 7)),
)
_ASIDE_RIGHT = (*((11, y) for y in range(2, 7)), *((x, 7) for x in (11, 10, 9, 8)))


class Distraction(NamedTuple):
    """Parts of a level that its solution does not need.

    Args:
        thing: whether the level has a second object.
        block: object whose noun is on an unused text block: the "second" object, or the "third", which is not on the
            map; an empty text means that the level has no such block.
        win_rule: whether the level has a second winning rule, for the third object.
    """

    thing: bool = False
    block: Literal["", "second", "third"] = ""
    win_rule: bool = False


_NOTHING = Distraction()
_DISTRACTIONS = {
    "": _NOTHING,
    "-distr_obj": Distraction(thing=True),
    "-distr_rule": Distraction(block="second"),
    "-distr_obj_rule": Distraction(thing=True, block="second"),
    "-distr_obj-irrelevant_rule": Distraction(thing=True, block="third"),
}
_WIN_RULE = {"-distr_win_rule": Distraction(thing=True, block="second", win_rule=True)}


class _Draft:
    """A level under construction: it has a border, and three random objects that can be placed."""

    def __init__(self, width: int, height: int, rng: np.random.Generator) -> None:
        self.width, self.height, self.rng = width, height, rng
        self.cells: dict[Cell, Element] = {
            (x, y): BORDER for x in range(width) for y in range(height) if x in (0, width - 1) or y in (0, height - 1)
        }
        self.names = [_CAST[int(number)] for number in rng.permutation(len(_CAST))]
        colours = [_CAST_COLOURS[int(number)] for number in rng.integers(len(_CAST_COLOURS), size=len(_CAST))]
        self.things = [thing(name, colour) for name, colour in zip(self.names, colours, strict=True)]

    def write(self, x: int, y: int, rule: str) -> None:
        """Put the blocks of a rule into this cell and the cells to the right of it."""
        for step, word in enumerate(rule.split()):
            self.cells[x + step, y] = _block(word)

    def put(self, element: Element, cells: Iterable[Cell]) -> Cell:
        """Put an element into a random empty cell of `cells` and return that cell."""
        free = [cell for cell in cells if cell not in self.cells]
        cell = free[int(self.rng.integers(len(free)))]
        self.cells[cell] = element
        return cell

    def move(self, start: Cell, cells: Iterable[Cell]) -> None:
        """Move the contents of the cell `start` to a random empty cell of `cells`."""
        self.put(self.cells[start], cells)
        del self.cells[start]

    def world(self) -> World:
        """Return the level."""
        order = ((x, y) for y in range(self.height) for x in range(self.width))
        return World.of(self.width, tuple((self.cells[cell],) if cell in self.cells else () for cell in order))


def _block(word: str) -> Element:
    if word == "is":
        return IS
    return Element("noun" if word in NOUNS else "color" if word in COLOURS else "prop", word)


def _area(left: int, right: int, top: int, bottom: int) -> list[Cell]:
    return [(x, y) for y in range(top, bottom + 1) for x in range(left, right + 1)]


def _one_room(rng: np.random.Generator, extra: Distraction, make_win: bool = False) -> World:
    draft = _Draft(8, 8, rng)
    target, second, third = draft.names
    draft.write(1, 6, "baba is you")
    draft.write(1, 1, f"{target} is win")
    if make_win:
        draft.move((1, 1), _area(2, 5, 2, 5))
    if extra.block:
        draft.put(_block(second if extra.block == "second" else third), _ASIDE)
    for element in (thing("baba"), draft.things[0], *draft.things[1 : 1 + extra.thing]):
        draft.put(element, _area(1, 6, 2, 6))
    return draft.world()


def _two_rooms(rng: np.random.Generator) -> _Draft:
    draft = _Draft(13, 9, rng)
    for cell in _area(6, 6, 1, 7):
        draft.cells[cell] = thing("wall")
    return draft


_SIDES = {"left": _area(1, 4, 1, 7), "right": _area(7, 10, 2, 7), "any": _area(1, 11, 2, 7)}


def _two_room(
    rng: np.random.Generator,
    extra: Distraction,
    side: Literal["left", "right", "any"],
    stop: bool = True,
    make_win: bool = False,
) -> World:
    draft = _two_rooms(rng)
    target, second, third = draft.names
    draft.write(1, 7, "baba is you")
    draft.write(1, 2, "wall is stop")
    draft.write(9, 1, f"{target} is win")
    if extra.win_rule:
        draft.write(9, 4, f"{third} is win")
    if extra.block:
        aside = extra.thing and extra.block == "second"
        draft.put(_block(second if extra.block == "second" else third), _ASIDE_RIGHT if aside else _area(7, 10, 3, 5))
    if not stop:
        draft.move((2 + int(rng.integers(2)), 2), _area(2, 5, 3, 5))
    if make_win:
        draft.move((9, 1), _area(7, 10, 3, 5))
    draft.put(thing("baba"), _area(2, 5, 3, 5))
    for element in draft.things[: 1 + extra.thing]:
        draft.put(element, _SIDES[side])
    return draft.world()


def _make_you(rng: np.random.Generator, make_win: bool = False) -> World:
    draft = _two_rooms(rng)
    target, second, _ = draft.names
    draft.write(1, 6, "baba is you")
    draft.write(1, 1, "wall is stop")
    draft.write(9, 1, f"{target} is win")
    if make_win:
        draft.move((9, 1), _area(8, 10, 3, 5))
    for element in (_block(second), thing("baba")):
        draft.put(element, _area(2, 4, 3, 5))
    for element in draft.things[:2]:
        draft.put(element, _SIDES["right"])
    return draft.world()


def _make_wall_win(rng: np.random.Generator) -> World:
    draft = _two_rooms(rng)
    target, _, third = draft.names
    draft.write(1, 7, "baba is you")
    draft.write(2, 2, "wall is stop")
    draft.write(9, 1, f"{target} is win")
    draft.move((9, 1), _ASIDE_RIGHT)
    draft.put(_block(third), _area(8, 10, 3, 5))
    draft.put(thing("baba"), _area(2, 4, 3, 5))
    for element in draft.things[:2]:
        draft.put(element, _SIDES["right"])
    return draft.world()


def _you_win(rng: np.random.Generator) -> World:
    """Return a level with two by two free cells and two objects that have the same noun but different colours."""
    draft = _Draft(6, 6, rng)
    noun = draft.names[0]
    first, second = (_CAST_COLOURS[int(number)] for number in rng.permutation(len(_CAST_COLOURS))[:2])
    draft.write(1, 1, f"{first} {noun} is you")
    draft.write(1, 4, f"{second} {noun} is win")
    for cell in (*_area(1, 1, 2, 3), *_area(4, 4, 2, 3)):
        draft.cells[cell] = BORDER
    x, y = draft.put(thing(noun, first), _area(2, 3, 2, 3))
    draft.put(thing(noun, second), [(5 - x, y), (x, 5 - y)])
    return draft.world()


def _family(
    prefix: str, build: Callable[..., World], distractions: dict[str, Distraction], **kwargs: object
) -> dict[str, Callable[[np.random.Generator], World]]:
    return {f"{prefix}{suffix}": partial(build, extra=extra, **kwargs) for suffix, extra in distractions.items()}


LEVELS: dict[str, Callable[[np.random.Generator], World]] = {
    **_family("goto_win", _one_room, _DISTRACTIONS),
    **_family("make_win", _one_room, _DISTRACTIONS, make_win=True),
    **_family("two_room-goto_win", _two_room, _DISTRACTIONS | _WIN_RULE, side="left", stop=False),
    **_family("two_room-break_stop-goto_win", _two_room, _DISTRACTIONS, side="right"),
    **_family("two_room-maybe_break_stop-goto_win", _two_room, _DISTRACTIONS, side="any"),
    **_family("two_room-make_win", _two_room, _DISTRACTIONS | _WIN_RULE, side="left", stop=False, make_win=True),
    **_family("two_room-break_stop-make_win", _two_room, _DISTRACTIONS, side="right", make_win=True),
    "two_room-make_you": _make_you,
    "two_room-make_you-make_win": partial(_make_you, make_win=True),
    "two_room-make_wall_win": _make_wall_win,
    "you_win": _you_win,
}
"""Name of a level -> function that builds the level with a random generator."""
