"""What a command writes replaces only what it has written before."""

from __future__ import annotations

from pathlib import Path

from lightning_agentrl.errors import ConfigError

PAGE = b"<!doctype html>"  # what a page begins with


def check_written_over(file: Path, begins: bytes, argument: str) -> None:
    """Refuse to write over a folder, or over a file of somebody else.

    Args:
        file: to be written; it may be there, empty or from before.
        begins: what a file of this kind begins with.
        argument: that names it.

    Raises:
        ConfigError: with the argument to change.
    """
    if file.is_dir():
        raise ConfigError(f"'{file}' is a folder; name the file to write (argument --{argument})")
    if not file.is_file():
        return
    with open(file, "rb") as there:
        found = there.read(len(begins))
    if found and found != begins:
        raise ConfigError(
            f"'{file}' is there already, and this command has not written it; name another file (argument --{argument})"
        )
