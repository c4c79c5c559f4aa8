"""`agentrl new`: a folder with a config, a game of one's own, a test of it, and what to do next."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from lightning_agentrl.tools import starter

_SUFFIX = ".txt"  # behind the name of each file in the package, where it is no code of the package


def make_project(folder: Path) -> list[str]:
    """Write the files of a new project: all of them, or none if the disk is full or the user interrupts.

    Args:
        folder: to be made, or empty.

    Returns:
        The names of the files.

    Raises:
        ValueError: there is something at its place already.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"'{folder}' exists and is not an empty folder; give another name: agentrl new NAME")
    files = {
        folder / one.name.removesuffix(_SUFFIX): one.read_text()
        for one in resources.files(starter).iterdir()
        if one.name.endswith(_SUFFIX)
    }
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            file.write_text(text)
    except BaseException:
        for file in files:
            if file.exists():
                file.unlink()
        for one in missing:
            if one.exists():
                one.rmdir()
        raise
    return sorted(file.name for file in files)
