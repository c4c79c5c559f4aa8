"""The one run that the name of a folder means, for commands that look at what a run left behind."""

from __future__ import annotations

from pathlib import Path

from lightning_agentrl.view.locate import version_of


def one_run(folder: Path, holds: str) -> Path:
    """Return a folder if it is that of a run, or the newest version of the one run below it, as `agentrl view` does.

    Args:
        folder: as the user names it.
        holds: file or folder that lies in every folder of a run that can be meant.

    Raises:
        ValueError: the folder does not exist, no run is below it, or several that are more than versions of one.
    """
    if not folder.is_dir():
        raise ValueError(f"the folder '{folder}' does not exist; name that of a run")
    if (folder / holds).exists():
        return folder
    found = sorted(path.parent for path in folder.glob(f"**/{holds}"))
    if not found:
        raise ValueError(f"no {holds} is in or below '{folder}'; name the folder of a run that wrote one")
    if len(found) > 1 and (len({run.parent for run in found}) > 1 or min(map(version_of, found)) < 0):
        listed = ", ".join(str(run.relative_to(folder)) for run in found)
        raise ValueError(f"there are several runs below '{folder}'; name the folder of one: {listed}")
    return max(found, key=version_of)
