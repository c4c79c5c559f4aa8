"""What a command writes at its end, and room for it: made or refused at the start, since hours may pass in between."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_agentrl.commands.written_over import check_written_over
from lightning_agentrl.errors import ConfigError, Problem, naming_file, one_line


def make_folder(folder: str | os.PathLike[str] | None, key: str, keep: bool = True) -> None:
    """Make a folder, or see whether it can be made.

    Args:
        folder: None: nothing is to be made.
        key: that names it.
        keep: leave it there; otherwise what was made is removed again.

    Raises:
        ConfigError: it cannot be made.
    """
    if folder is None:
        return
    path = os.path.expanduser(os.fspath(folder))
    if "://" in path:
        raise ConfigError(f"{key} '{path}' is not a folder of this machine; give one, and copy from there")
    if os.path.expandvars(path) != path:
        raise ConfigError(f"{key} '{path}' names a variable, which only a shell fills in; write out the folder")
    try:
        missing = [] if keep else [one for one in (Path(path), *Path(path).parents) if not one.exists()]
        Path(path).mkdir(parents=True, exist_ok=True)
        for one in missing:
            one.rmdir()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(str(error))
        what = f"the folder '{path}' cannot be made: {why}"
        raise ConfigError(Problem(what, key=key, fix="give another one")) from error


def make_room_for(file: Path, begins: bytes, argument: str) -> None:
    """Make the folder of a file, and see whether the file can be written.

    Args:
        file: to be written, or written anew.
        begins: what it begins with.
        argument: that names it.

    Raises:
        ConfigError: it cannot be written.
    """
    check_written_over(file, begins, argument)
    make_folder(file.parent, f"--{argument}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"'{file}' cannot be written; name another file (argument --{argument})")


def write(file: Path, text: str) -> None:
    """Write a file, in a folder that may not be there; an error names it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with naming_file(file):
        file.write_text(text, encoding="utf-8")
