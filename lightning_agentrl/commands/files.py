"""Files that commands read and write: shipped configs, and checks that output files can be written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import lightning_agentrl
from lightning_agentrl.errors import ConfigError, Problem, closest, naming_file

PAGE = b"<!doctype html>"  # first bytes of a page
_PACKAGE = Path(lightning_agentrl.__file__).parent


def shipped_configs() -> dict[str, Path]:
    """Return the shipped configs and suites by name, from the installed package or from the repository."""
    folder = next((folder for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.rglob("*.yaml"))}


ANY_GAME = "any_game"  # shipped config for any game that `--env` names
SHORT = {"--env": "--data.init_args.env.id", "--policy": "--model.init_args.model"}


def with_game(arguments: Sequence[str]) -> list[str]:
    """Replace `--env` and `--policy` by their full keys, and add the shipped config for any game if no config is given.

    These options override the keys of the config.
    """
    found, short = list[str](), False
    for argument in arguments:
        option, equals, value = argument.partition("=")
        short |= option in SHORT
        found.append(f"{SHORT.get(option, option)}{equals}{value}")
    configured = any(argument.partition("=")[0] in ("-c", "--config") for argument in arguments)
    return [found[0], "--config", ANY_GAME, *found[1:]] if short and not configured else found


def with_shipped_configs(arguments: Sequence[str]) -> list[str]:
    """Replace the names of shipped configs by their paths. An existing file with that name takes precedence.

    Raises:
        ConfigError: a config is neither a file nor a shipped config.
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
    """Create an output folder at the start of a command, since hours may pass before the folder is used.

    Args:
        folder: folder to create; an existing folder is accepted.
        key: key or argument that names the folder, for the error message.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder '{folder}' cannot be created: {error.strerror}"
        raise ConfigError(Problem(what, key=key, fix="name another one")) from error


def make_room_for(file: Path, begins: bytes, argument: str) -> None:
    """Create the folder of an output file, and refuse to replace a file that this command has not written.

    Args:
        file: output file; an empty file, or a file with the first bytes ``begins``, may be replaced.
        begins: first bytes of the output.
        argument: name of the argument that gives the file, for the error message.

    Raises:
        ConfigError: the file cannot be written, or is of another kind.
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
    """Write a text file and create its folder; an error names the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(file):
        file.write_text(text, encoding="utf-8")


@contextmanager
def naming_argument() -> Iterator[None]:
    """Turn a ValueError into a ConfigError that names the argument --model instead of the key model.init_args.model.

    Raises:
        ConfigError: a ValueError was raised in the context.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error).replace("key model.init_args.model", "argument --model")) from error
