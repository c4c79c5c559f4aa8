"""`agentrl new`: a folder with a config, a game of one's own, a test of it, and what to do next."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from lightning_agentrl.commands import starter

_SUFFIX = ".txt"  # behind the name of each file in the package, where it is no code of the package


def make_project(folder: Path) -> list[str]:
    """Write the files of a new project.

    Args:
        folder: to be made, or empty.

    Returns:
        The names of the files.

    Raises:
        ValueError: there is something at its place already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"'{folder}' exists and is not an empty folder; give another name: agentrl new NAME")
    files = {one.name: one for one in resources.files(starter).iterdir() if one.name.endswith(_SUFFIX)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        (folder / name.removesuffix(_SUFFIX)).write_text(file.read_text())
    return sorted(name.removesuffix(_SUFFIX) for name in files)
