"""`agentrl new`: write a folder with a config, a game, a test, and a page with the next steps."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from lightning_agentrl.tools import starter

_SUFFIX = ".txt"  # appended to the names of the files in the package, so that they are not code of the package


def make_project(folder: Path) -> list[str]:
    """Write the files of a new project; remove the files after an error or interrupt.

    Args:
        folder: folder to create; an empty folder may exist.

    Returns:
        The names of the files.

    Raises:
        ValueError: the folder exists and is not empty, or is a file.
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
