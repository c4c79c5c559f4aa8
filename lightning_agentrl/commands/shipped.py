"""The configs that come with the package, which are given by their names alone: `--config quickstart`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import lightning_agentrl

_PACKAGE = Path(lightning_agentrl.__file__).parent


def shipped_configs() -> dict[str, Path]:
    """Return the files by their names: those of the wheel, or of the repository beside the package."""
    folder = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def with_shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Return arguments with a path in place of the name of a shipped config; a file of that name comes first."""
    known = shipped_configs()

    def path(value: str) -> str:
        return str(known[value]) if value in known and not Path(value).is_file() else value

    found = []
    for before, argument in pairwise(("", *arguments)):
        option, equals, value = argument.partition("=")
        if before in ("-c", "--config"):
            argument = path(argument)
        elif equals and option in ("-c", "--config"):
            argument = f"{option}={path(value)}"
        found.append(argument)
    return found
