"""Where a key was given: which file and line, or the command line. Says nothing where it cannot be sure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import yaml

from lightning_agentrl.errors.arguments import options
from lightning_agentrl.errors.problem import COMMAND_LINE, Place, Problem


@dataclass(frozen=True)
class _Hit:
    """A place that a key leads to."""

    key: str
    line: int
    node: yaml.Node
    owner: str = ""  # short name of the class whose argument it is


@dataclass(frozen=True)
class _File:
    path: str
    root: yaml.Node

    def hits(self, parts: Sequence[str]) -> list[_Hit]:
        return list(_walk(self.root, parts, _Hit("", 1, self.root)))

    def place(self, hit: _Hit) -> Place:
        return Place(f"{self.path}, line {hit.line}", hit.key)

    def hides(self, parts: Sequence[str]) -> bool:
        """A further file stands where the key would be, so what it holds is not seen."""
        for count in range(1, len(parts)):
            values = [hit.node.value for hit in self.hits(parts[:count]) if isinstance(hit.node, yaml.ScalarNode)]
            if any(Path(value).suffix in (".yaml", ".yml", ".json") for value in values):
                return True
        return False


@dataclass(frozen=True)
class _Argument:
    key: str
    text: str

    def hits(self, parts: Sequence[str]) -> list[_Hit]:
        """Hits of a key, written with or without the `init_args` that the command line does not need."""
        own, wanted = _short(_split(self.key)), _short(parts)
        if wanted[: len(own)] != own:
            return []
        try:
            node = yaml.compose(self.text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:
            node = None
        if node is None:
            node = yaml.ScalarNode("tag:yaml.org,2002:str", self.text)
        hits = _walk(_shortened(node), wanted[len(own) :], _Hit(self.key, 1, node))
        return list(hits)

    def place(self, hit: _Hit) -> Place:
        return Place(COMMAND_LINE, hit.key)

    def hides(self, parts: Sequence[str]) -> bool:
        own = _short(_split(self.key))
        return _short(parts)[: len(own)] == own and Path(self.text).suffix in (".yaml", ".yml", ".json")


class Sources:
    """Config files and options of a command, in their order; of two that give a key, the later one counts.

    Args:
        arguments: of the command, without its own name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)

    @cached_property
    def _given(self) -> list[_File | _Argument]:
        given: list[_File | _Argument] = []
        for name, value in options(self.arguments):
            if name in ("c", "config"):
                given += _read(value)
            else:
                given.append(_Argument(name, value))
        return given

    def places(self, problem: Problem) -> list[Place]:
        """Where the keys of a problem were given, at most three of them."""
        if problem.place is not None:
            return [problem.place]
        found = [self.find(replace(problem, key=key)) for key in problem.keys]
        return list(dict.fromkeys(place for place in found if place is not None))[:3]

    def find(self, problem: Problem) -> Place | None:
        """Where the key of a problem was given; what should hold it, if it is missing."""
        parts = _split(problem.key)
        if problem.classless:
            return self._find_classless(parts)
        for count in range(len(parts), 0 if problem.missing else len(parts) - 1, -1):
            for source in reversed(self._given):
                hits = [hit for hit in source.hits(parts[:count]) if _fits(hit, problem, whole=count == len(parts))]
                if len(hits) == 1:
                    return source.place(hits[0])
                if hits or source.hides(parts):  # of several there is no saying which
                    return None
        return None

    def _find_classless(self, parts: Sequence[str]) -> Place | None:
        """A value in place of a class is wrong anywhere; arguments without a class only before it was ever given."""
        for source in reversed(self._given):
            for hit in source.hits(parts):
                if isinstance(hit.node, yaml.ScalarNode) and not hit.node.tag.endswith((":str", ":null")):
                    return source.place(hit)
        first = next((source for source in self._given if source.hits(parts)), None)
        hits = [] if first is None else first.hits(parts)
        classless = len(hits) == 1 and all(key.value != "class_path" for key, _ in _pairs(hits[0].node))
        return first.place(hits[0]) if first and classless else None


def _read(path: str) -> list[_File | _Argument]:
    """The tree of a file; nothing where it cannot be read, which is told elsewhere."""
    try:
        root = yaml.compose(Path(path).read_text(), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []
    if root is None:
        return []
    nested = [node for name in ("fit", "validate") for key, node in _pairs(root) if key.value == name]
    return [_File(path, node) for node in [root, *nested]]


def _split(key: str) -> list[str]:
    """Parts of a dotted key; the number of a list item is a part of its own."""
    return [part.rstrip("+") for part in re.split(r"[.\[\]]+", key) if part]


def _short(parts: Sequence[str]) -> list[str]:
    return [part for part in parts if part != "init_args"]


def _shortened(node: yaml.Node) -> yaml.Node:
    """A tree whose `init_args` are merged into the mappings around them."""
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(node.tag, [_shortened(item) for item in node.value], node.start_mark)
    if not isinstance(node, yaml.MappingNode):
        return node
    pairs: list[tuple[yaml.Node, yaml.Node]] = []
    for key, value in node.value:
        inner = isinstance(value, yaml.MappingNode) and key.value == "init_args"
        pairs += _shortened(value).value if inner else [(key, _shortened(value))]
    return yaml.MappingNode(node.tag, pairs, node.start_mark)


def _pairs(node: yaml.Node) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Keys and values of a mapping; what `<<` merges into it comes after its own."""
    if not isinstance(node, yaml.MappingNode):
        return
    merged: list[yaml.Node] = []
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        else:
            yield key, value
    for other in merged:
        yield from _pairs(other)


def _walk(node: yaml.Node, parts: Sequence[str], here: _Hit) -> Iterator[_Hit]:
    """All places that the parts of a key lead to; in a list, without a number, through every item."""
    if not parts:
        yield here
        return
    head, rest = parts[0], parts[1:]
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            hit = replace(here, key=f"{here.key}[{index}]", line=_line(item), node=item)
            if head == str(index):
                yield from _walk(item, rest, hit)
            elif not head.isdigit():
                yield from _walk(item, parts, hit)
    elif isinstance(node, yaml.ScalarNode) and head == "class_path" and not rest:
        yield replace(here, key=f"{here.key}.class_path")  # a class may be given by its name alone
    elif isinstance(node, yaml.MappingNode):
        pairs = list(_pairs(node))
        outer = here.owner if here.key.endswith(".init_args") else ""
        owner = next((_last(value) for key, value in pairs if key.value == "class_path"), outer)
        for key, value in pairs:
            if str(key.value).rstrip("+") == head:
                name = f"{here.key}.{key.value}".lstrip(".")
                yield from _walk(value, rest, replace(here, key=name, line=_line(key), node=value, owner=owner))
                return


def _fits(hit: _Hit, problem: Problem, whole: bool) -> bool:
    """Whether a hit can be what a problem speaks of."""
    if problem.owner and hit.owner and hit.owner != problem.owner:
        return False
    return not whole or problem.value is None or _equals(hit.node, problem.value)


def _equals(node: yaml.Node, text: str) -> bool:
    """Whether a node holds the value that a complaint shows."""
    if node.value == text:
        return True
    try:
        value = yaml.safe_load(yaml.serialize(node))
    except yaml.YAMLError:
        return False
    return str(value) == text or (isinstance(value, Mapping) and str(dict(value)) == text)


def _last(node: yaml.Node) -> str:
    return str(node.value).rsplit(".", 1)[-1]


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1 if node.start_mark else 1
