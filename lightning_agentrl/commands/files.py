"""Files that commands read and write: shipped configs, and room for what is written at the end of a command."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import lightning_agentrl
from lightning_agentrl.errors import ConfigError, Problem, closest, naming_file

PAGE = b"<!doctype html>"  # what a page begins with
_PACKAGE = Path(lightning_agentrl.__file__).parent


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configs and suites by name: those of the wheel, or of the repository beside the package."""
    folder = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.rglob("*.yaml"))}


ANY_GAME = "any_game"  # the shipped config of a game that is named by an option
SHORT = {"--env": "--data.init_args.env.id", "--policy": "--model.init_args.model"}


def with_game(arguments: Sequence[str]) -> list[str]:
    """Return arguments with the keys that `--env` and `--policy` stand for, behind the shipped config for any game.

    Keys of a config that is given as well hold unless these set them.
    """
    found, short = list[str](), False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        short |= option in SHORT
        found.append(f"{SHORT.get(option, option)}{equals}{value}")
    configured = any(argument.partition("=")[0] in ("-c", "--config") for argument in arguments)
    return [found[0], "--config", ANY_GAME, *found[1:]] if short and not configured else found


def with_shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Return arguments with a path in place of the name of a shipped config; a file of that name comes first.

    Raises:
        ConfigError: a config is neither a file nor shipped.
    """
    known = shipped_configs()

    def path(value: str) -> str:
        if Path(value).exists():
            return value
        if value in known:
            return str(known[value])
        meant = closest(Path(value).stem, list(known), cutoff=0.8)
        what = f"the file '{value}' does not exist (argument --config)"
        listed = () if "." in value or "/" in value else tuple(known)
        raise ConfigError(Problem(what, suggestion=f"--config {meant}" if meant else "", known=listed))

    found = []
    for before, argument in pairwise(("", *arguments)):
        option, equals, value = argument.partition("=")
        if before in ("-c", "--config") and not argument.startswith("-"):
            argument = path(argument)
        elif equals and option in ("-c", "--config"):
            argument = f"{option}={path(value)}"
        found.append(argument)
    return found


def make_folder(folder: str | Path, key: str) -> None:
    """Make a folder at the start of a command, since hours may pass before it is written to.

    Raises:
        ConfigError: it cannot be made, with the key or argument that names it.
    """
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder '{folder}' cannot be made: {error.strerror}"
        raise ConfigError(Problem(what, key=key, fix="give another one")) from error


def make_room_for(file: Path, begins: bytes, argument: str) -> None:
    """Make the folder of a file that is written later, and refuse to replace a file of another kind.

    Args:
        file: to be written; an empty one and one from an earlier call are replaced.
        begins: first bytes of such a file.
        argument: the argument that names it.

    Raises:
        ConfigError: with the argument to change.
    """
    if file.is_dir():
        raise ConfigError(f"'{file}' is a folder; name the file to write (argument --{argument})")
    if file.is_file():
        with open(file, "rb") as there:
            found = there.read(len(begins))
        if found and found != begins:
            what = f"'{file}' exists and was not written by this command"
            raise ConfigError(f"{what}; name another file (argument --{argument})")
    make_folder(file.parent, f"--{argument}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"'{file}' cannot be written; name another file (argument --{argument})")


def write(file: Path, text: str) -> None:
    """Write a file, also in a new folder; an error names it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(file):
        file.write_text(text, encoding="utf-8")


@contextmanager
def naming_argument() -> Iterator[None]:
    """Let a sentence about a model name the argument --model in place of the key.

    Raises:
        ConfigError: the sentence of a ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error).replace("key model.init_args.model", "argument --model")) from error
