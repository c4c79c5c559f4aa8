"""The command line, looked at before the imports that take seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from lightning_agentrl.errors.files import check_yaml, tree_of
from lightning_agentrl.errors.problem import COMMAND_LINE, ConfigError, Place, Problem


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names, without dashes, and values of the options of a command line."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-"):
            continue
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        yield name, value if equals else ("" if following.startswith("--") else following)


def check_files(arguments: Sequence[str]) -> None:
    """Refuse config files that are not there, wrong, or without a model; can come before all imports, which take time.

    Raises:
        ConfigError: about the first of them.
    """
    given, partly = set(), False  # the keys at the top that are given somewhere; whether that is all of them
    for name, value in options(arguments):
        if name not in ("c", "config"):
            given.add(name.split(".")[0])
            partly = partly or name in ("h", "help", "print_config")
        elif "{" in value:  # the parser takes a whole config in place of a path, too
            partly = True
        elif not Path(value).exists():
            raise ConfigError(f"the file '{value}' does not exist (argument --config)")
        else:
            check_yaml(Path(value))
            given |= _top_keys(Path(value))
    lacking = [key for key in ("data", "model") if key not in given]
    if lacking and not partly and not given & {"fit", "validate"}:
        alone = [argument for before, argument in pairwise(("", *arguments)) if not before.startswith("-")]
        files = [argument for argument in alone if argument.endswith((".yaml", ".yml"))]
        raise ConfigError(stray(files[0]) if files else missing_top_keys(lacking))


def _top_keys(path: Path) -> set[str]:
    root = tree_of(path)
    return {str(key.value) for key, _ in root.value} if isinstance(root, yaml.MappingNode) else set()


def missing_top_keys(names: Sequence[str]) -> Problem:
    """Keys without which there is no run."""
    return Problem(f"{named(names)} missing", fix="give a config file with --config that has what is missing")


def stray(argument: str, takes_config: bool = True) -> Problem:
    """An argument that belongs to no option."""
    is_config = takes_config and argument.endswith((".yaml", ".yml"))
    return Problem(
        f"the argument '{argument}' belongs to no key",
        place=Place(COMMAND_LINE, argument),
        suggestion=f"--config {argument}" if is_config else f"--{argument}" if "=" in argument else "",
    )


def named(keys: Sequence[str], whose: str = "") -> str:
    many = len(keys) > 1
    return f"the key{'s' * many} {' and '.join(keys)}{whose} {'are' if many else 'is'}"
