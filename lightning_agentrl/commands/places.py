"""Where a key was given: file and line, or the command line. Nothing is returned where it is not certain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import yaml

from lightning_agentrl.errors.problem import COMMAND_LINE, ConfigError, Place, Problem, one_line

SUBCOMMANDS = ("fit", "validate")  # of LightningCLI; the keys of a command may be below its name
_FILES = (".yaml", ".yml", ".json")
_YAML_FIXES = {
    "'\\t'": "indent with spaces, not with tabs",
    "mapping values are not allowed here": "indent all keys of a level alike, and quote a value that contains ': '",
    "found character '@'": "quote the value",
    "found character '`'": "quote the value",
}


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names, without dashes, and values of the options of a command line."""
    for argument, following in pairwise((*arguments, "")):
        if argument.startswith("-"):
            name, equals, value = argument.lstrip("-").partition("=")
            yield name, value if equals else ("" if following.startswith("--") else following)


def tree_of(path: Path) -> yaml.Node | None:
    """Return the node tree of a config file, whose nodes have their line numbers.

    Raises:
        ConfigError: it cannot be read, is not YAML of plain values, or a part of it holds itself.
    """
    try:
        text = path.read_text()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if (inside := _inside_itself(root, (), set())) is not None:
            what, place = "a part of the config file holds itself", Place(f"{path}, line {_line(inside)}")
            raise ConfigError(Problem(what, place=place, fix="write what it should hold in place of its own name (*)"))
        with suppress(ValueError):  # of a date that there is not, which a run reads as text
            yaml.safe_load(text)  # finds tags and keys that no value can be made of
    except RecursionError:
        raise ConfigError(f"the config file '{path}' is nested too deeply") from None
    except OSError as error:
        raise ConfigError(f"the config file '{path}' cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        place = Place(f"{path}, line {error.object[: error.start].count(10) + 1}")
        what = f"the config file is not text in {error.encoding.upper()}: {error.reason}"
        fix = (
            "save it as UTF-8" if error.encoding == "utf-8" else "set PYTHONUTF8=1, with which files are read as UTF-8"
        )
        raise ConfigError(Problem(what, place=place, fix=fix)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or one_line(str(error))
        place = Place(f"{path}, line {mark.line + 1}, column {mark.column + 1}") if mark else Place(str(path))
        fix = next((fix for sign, fix in _YAML_FIXES.items() if sign in problem), "")
        raise ConfigError(Problem(f"the config file is not valid YAML: {problem}", place=place, fix=fix)) from None
    return root


def _inside_itself(node: yaml.Node | None, above: tuple[yaml.Node, ...], sound: set[int]) -> yaml.Node | None:
    """Return a node that is among those that it holds, as an anchor allows; None if there is none.

    Args:
        node: the tree.
        above: the nodes that hold it.
        sound: ids of nodes that were looked at before.
    """
    if not isinstance(node, yaml.CollectionNode) or id(node) in sound:
        return None
    if any(node is other for other in above):
        return node
    for part in (part for item in node.value for part in (item if isinstance(item, tuple) else (item,))):
        if (inside := _inside_itself(part, (*above, node), sound)) is not None:
            return inside
    sound.add(id(node))
    return None


@dataclass(frozen=True)
class _Hit:
    """A node that a key leads to."""

    node: yaml.Node
    file: str  # empty: the command line
    key: str = ""
    line: int = 1
    owner: str = ""  # short name of the class whose argument it is
    hidden: bool = False  # it would be in another file, which is named here

    @property
    def place(self) -> Place:
        return Place(f"{self.file}, line {self.line}" if self.file else COMMAND_LINE, self.key)


def places_of(problem: Problem, arguments: Sequence[str]) -> list[Place]:
    """Return where the keys of a problem were given, at most three of them.

    Args:
        problem: what is wrong.
        arguments: of the command, without its own name; of two that give a key, the later one counts.
    """
    if problem.place is not None:
        return [problem.place]
    given = list(_given(arguments))
    found = [_find(replace(problem, key=key), given) for key in problem.keys]
    return list(dict.fromkeys(place for place in found if place is not None))[:3]


def _given(arguments: Sequence[str]) -> Iterator[_Hit]:
    """Yield the roots of config files and options, in their order."""
    for name, value in options(arguments):
        if name in ("c", "config"):
            with suppress(ConfigError):  # what cannot be read is reported elsewhere
                if (root := tree_of(Path(value))) is not None:
                    yield _Hit(root, value)
                    yield from (_Hit(node, value) for key, node in _pairs(root) if key.value in SUBCOMMANDS)
        else:
            yield _Hit(_tree(name, value), "")


def _tree(name: str, value: str) -> yaml.Node:
    """Return an option as the tree that a file would hold."""
    try:
        node = yaml.compose(value, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if node is None or _inside_itself(node, (), set()) is not None:
        node = yaml.ScalarNode("tag:yaml.org,2002:str", value)
    for part in reversed(_split(name)):
        node = yaml.MappingNode("tag:yaml.org,2002:map", [(yaml.ScalarNode("tag:yaml.org,2002:str", part), node)])
    return node


def _split(key: str) -> list[str]:
    """Return the parts of a dotted key; the number of a list item is a part of its own."""
    return [part.rstrip("+") for part in re.split(r"[.\[\]]+", key) if part]


def _find(problem: Problem, given: Sequence[_Hit]) -> Place | None:
    """Find the key of a problem; if it is missing, the key above it."""
    parts = _split(problem.key)
    if problem.classless:
        return _find_classless([hit for root in given for hit in _walk(root, parts)])
    for count in range(len(parts), 0 if problem.missing else len(parts) - 1, -1):
        for root in reversed(given):
            hits = [hit for hit in _walk(root, parts[:count]) if _fits(hit, problem, whole=count == len(parts))]
            if hits:
                return hits[0].place if len(hits) == 1 and not hits[0].hidden else None  # not certain among several
    return None


def _find_classless(hits: Sequence[_Hit]) -> Place | None:
    """Find a value where a class belongs, or arguments given without a class."""
    values = [hit for hit in hits if isinstance(hit.node, yaml.ScalarNode)]
    if wrong := [hit for hit in values if not hit.node.tag.endswith(("str", "null"))]:
        return wrong[-1].place
    without = [hit for hit in hits[:1] if all(key.value != "class_path" for key, _ in _pairs(hit.node))]
    return without[0].place if without else None


def _walk(here: _Hit, parts: Sequence[str]) -> Iterator[_Hit]:
    """Yield all nodes that the parts of a key lead to; in a list, without a number, through every item."""
    if not parts:
        yield here
        return
    head, rest, node = parts[0], parts[1:], here.node
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            hit = replace(here, key=f"{here.key}[{index}]", line=_line(item), node=item)
            if head == str(index):
                yield from _walk(hit, rest)
            elif not head.isdigit():
                yield from _walk(hit, parts)
    elif isinstance(node, yaml.ScalarNode):
        if head == "class_path" and not rest:
            yield replace(here, key=f"{here.key}.class_path")  # a class may be given by its name alone
        elif Path(node.value).suffix in _FILES:
            yield replace(here, hidden=True)
    else:
        outer = here.owner if here.key.endswith(".init_args") else ""
        classes = (str(value.value) for key, value in _pairs(node) if key.value == "class_path")
        owner = next(classes, outer).rsplit(".", 1)[-1]
        pair = next((pair for pair in _pairs(node) if str(pair[0].value).rstrip("+") == head), None)
        if pair is not None:
            key = f"{here.key}.{pair[0].value}".lstrip(".")
            yield from _walk(replace(here, key=key, line=_line(pair[0]), node=pair[1], owner=owner), rest)
        elif head == "init_args":  # the command line does not need it
            yield from _walk(replace(here, owner=owner), rest)


def _pairs(node: yaml.Node) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield keys and values of a mapping; those that `<<` merges into it come after its own."""
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


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1 if node.start_mark else 1


def _fits(hit: _Hit, problem: Problem, whole: bool) -> bool:
    """Return whether a hit can be what a problem is about."""
    if problem.owner and hit.owner and hit.owner != problem.owner:
        return False
    return hit.hidden or not whole or problem.value is None or _equals(hit.node, problem.value)


def _equals(node: yaml.Node, text: str) -> bool:
    """Return whether a node has the value that an error message shows."""
    with suppress(yaml.YAMLError):
        return node.value == text or str(yaml.safe_load(yaml.serialize(node))) == text
    return False
