"""Rules that the text blocks on a map spell."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from agentrl_envs.baba.elements import IS, NOUNS, PROPERTIES, THINGS, Element, Stack


class Rule(NamedTuple):
    """The rule `<noun> is <word>`, for all objects with this noun or only for objects of one colour."""

    colour: str
    noun: str
    word: str

    def covers(self, element: Element) -> bool:
        """Return whether the rule applies to this object."""
        return element.name == self.noun and self.colour in ("", element.colour)

    def __str__(self) -> str:
        return f"{self.colour} {self.noun} is {self.word}".lstrip()


@dataclass(frozen=True)
class Rules:
    """The rules in force.

    Args:
        told: rules that give objects a property, in reading order.
        having: property -> all objects that have this property, on the map or not.
        becoming: object -> new object into which the rules turn this object.
    """

    told: tuple[Rule, ...]
    having: Mapping[str, frozenset[Element]]
    becoming: Mapping[Element, Element]


def read_rules(width: int, cells: tuple[Stack, ...]) -> Rules:
    """Return the rules around all visible IS blocks, in reading order of the blocks; for each block first the row."""
    found: list[Rule] = []
    for here, stack in enumerate(cells):
        if stack and stack[-1] == IS:
            column = here % width
            row = cells[here - column : here - column + width]
            found += _read_line(row, column)
            found += _read_line(cells[column::width], here // width)
    return _consequences(tuple(found))


@lru_cache(maxsize=4096)
def _consequences(found: tuple[Rule, ...]) -> Rules:
    told = tuple(rule for rule in found if rule.word in PROPERTIES)
    having = {
        word: frozenset(element for rule in told if rule.word == word for element in THINGS if rule.covers(element))
        for word in PROPERTIES
    }
    becoming: dict[Element, Element] = {}
    for rule in found:
        for element in THINGS:
            if rule.word in NOUNS and rule.covers(element):
                becoming.setdefault(element, element._replace(name=rule.word))
    return Rules(told, having, becoming)


def _read_line(line: tuple[Stack, ...], middle: int) -> list[Rule]:
    """Return a list with the rule around the IS block at index `middle` of a row or column; empty without a rule."""
    colour, noun, word = (
        line[place][-1] if 0 <= place < len(line) and line[place] else None
        for place in (middle - 2, middle - 1, middle + 1)
    )
    if noun is None or word is None or noun.kind != "noun" or word.kind not in ("noun", "prop"):
        return []
    return [Rule(colour.name if colour is not None and colour.kind == "color" else "", noun.name, word.name)]
