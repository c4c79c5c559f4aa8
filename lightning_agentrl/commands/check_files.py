"""Checks of config files before the parser reads them: it takes seconds to import, does not say which file is wrong,
and drops keys that are given twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from lightning_agentrl.commands.places import SUBCOMMANDS, options, tree_of
from lightning_agentrl.commands.shipped import shipped_configs
from lightning_agentrl.errors import closest
from lightning_agentrl.errors.foreign_messages import OPTIONS
from lightning_agentrl.errors.problem import COMMAND_LINE, ConfigError, Place, Problem
from lightning_agentrl.errors.unknown import TOP_KEYS, missing_keys, no_value, unknown_argument, unknown_top_key

_FURTHER_KEYS = (
    *("weights_only", "subcommand", "verbose", "quiet", "dry_run", "resume_with_changes"),
    *SUBCOMMANDS,
)


def check_files(arguments: Sequence[str]) -> None:
    """Refuse an option without its value, config files that are missing or wrong, and files that lack model or data.

    Raises:
        ConfigError: about the first of them.
    """
    _refuse_no_value(arguments)
    given, partly = set(), False  # the top-level keys that are given; whether there may be more
    for name, value in options(arguments):
        if name not in ("c", "config"):
            given.add(name.split(".")[0])
            partly = partly or name in ("h", "help", "print_config")
        elif "{" in value:  # the parser also takes a whole config in place of a path
            partly = True
        elif not Path(value).exists():
            raise ConfigError(no_config(value))
        elif not (Path(value).is_file() or Path(value).is_dir()):
            what = f"'{value}' is a pipe or a device, and a config is read more than once"
            place = Place(COMMAND_LINE, "--config")  # known, so that it is not read to look for one
            raise ConfigError(Problem(what, place=place, fix="write it to a file"))
        else:
            given |= check_file(Path(value))
    lacking = [key for key in ("data", "model") if key not in given]
    misspelt = given.difference(OPTIONS, _FURTHER_KEYS)  # or of one command: the parser knows
    if lacking and not partly and not misspelt and not given.intersection(SUBCOMMANDS):
        alone = [argument for before, argument in pairwise(("", *arguments)) if not before.startswith("-")]
        files = [argument for argument in alone if argument.endswith((".yaml", ".yml"))]
        raise ConfigError(unknown_argument(files[0], ("config",)) if files else missing_keys(lacking))


def _refuse_no_value(arguments: Sequence[str]) -> None:
    """Refuse an option of a config's key that is followed by nothing; the parser would name only its beginning."""
    for argument, following in pairwise((*arguments, "--")):
        name = argument.removeprefix("--")
        of_a_key = name.split(".")[0] in (*TOP_KEYS, "config") and not name.endswith((".help", "="))
        if argument.startswith("--") and of_a_key and "=" not in name and following.startswith("--"):
            raise ConfigError(no_value(name))


def no_config(value: str) -> Problem:
    """Describe a config that is neither a file nor shipped."""
    names = tuple(shipped_configs())
    meant = closest(Path(value).stem, names, cutoff=0.8)
    known = names if "." not in value and "/" not in value else ()
    what = f"the file '{value}' does not exist (argument --config)"
    return Problem(what, suggestion=f"--config {meant}" if meant else "", known=known)


def check_file(path: Path) -> set[str]:
    """Refuse a config file that cannot be read, is not YAML, gives a key twice, or has unknown top-level keys.

    Returns:
        The top-level keys.

    Raises:
        ConfigError: with the file and the line in it.
    """
    root = tree_of(path)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"the config file '{path}' holds no keys; it needs {', '.join(TOP_KEYS[1:4])}")
    for key, first, second in _given_twice(root, "", set()):
        place = Place(f"{path}, lines {first} and {second}", key)
        fix = "only the last would count; remove one of them"
        raise ConfigError(Problem(f"the key {key} is given twice", key=key, place=place, fix=fix))
    for key, _ in root.value:
        if str(key.value) not in (*TOP_KEYS, *_FURTHER_KEYS):
            raise ConfigError(unknown_top_key(str(key.value), Place(f"{path}, line {key.start_mark.line + 1}")))
    if root.value and all(value.tag == "tag:yaml.org,2002:null" for _, value in root.value):
        (key, _), *_ = root.value  # the parser would take the file for a text
        what, place = str(key.value), Place(f"{path}, line {key.start_mark.line + 1}", str(key.value))
        lacks = "has no keys; give it some" if what in ("model", "data", "trainer") else "has no value; write one"
        raise ConfigError(Problem(f"{what} {lacks}, or leave it out", key=what, place=place))
    return {str(key.value) for key, _ in root.value}


def _given_twice(node: yaml.Node, above: str, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    """Yield keys that appear twice in one mapping, with their lines; anchored nodes are visited once."""
    if id(node) in seen or isinstance(node, yaml.ScalarNode):
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _given_twice(item, f"{above}[{index}]", seen)
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        full, line = f"{above}.{key.value}".lstrip("."), int(key.start_mark.line) + 1
        if full in lines and key.tag != "tag:yaml.org,2002:merge":
            yield full, lines[full], line
        lines[full] = line
        yield from _given_twice(value, full, seen)
