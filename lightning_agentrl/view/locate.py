"""Which files of a run folder belong on the page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOG_NAME = re.compile(r"rank(\d+)-(\d+)\.jsonl")
_VERSION_NAME = re.compile(r"version_(\d+)")


@dataclass(frozen=True)
class RunFiles:
    """The files of a run that were found. Everything but the logs may be missing."""

    name: str  # the run folder, with the version if it is one of several
    logs: tuple[Path, ...]  # by rank, then in the order they were written
    events: Path | None  # folder with TensorBoard event files
    summary: Path | None
    facts: Path | None  # run.json
    config: Path | None
    notes: tuple[str, ...]  # sentences for the reader of the page


def find_run(run: Path) -> RunFiles:
    """Find the newest version below ``run`` that has a turn log, and its other files.

    Raises:
        ValueError: ``run`` is not a folder, or there is no turn log below it.
    """
    if not run.is_dir():
        what = "is a file" if run.exists() else "does not exist"
        raise ValueError(f"'{run}' {what}; give the folder of a run")
    root = run.resolve()
    versions = _versions(root)
    if not versions:
        raise ValueError(
            f"there is no turn log below '{run}'; add the callback TurnLog to trainer.callbacks and run again"
        )
    chosen = _newest(versions)
    logs = sorted(_logs(chosen), key=log_order)
    notes = []
    if len(versions) > 1:
        others = ", ".join(sorted(_relative(v, root) for v in versions if v != chosen))
        notes.append(
            f"{len(versions)} versions have turn logs; this is {_relative(chosen, root)}, the newest. "
            f"The command takes the folder of another one: {others}."
        )
    events = {path.parent for path in chosen.rglob("events.out.tfevents.*")}
    places = (chosen, *_above(chosen, root))
    return RunFiles(
        name=_name(chosen),
        logs=tuple(logs),
        events=_newest(events) if events else None,
        summary=_first("summary.json", places),
        facts=_first("run.json", places),
        config=_first("config.yaml", places),
        notes=tuple(notes),
    )


def log_order(path: Path) -> tuple[int, int]:
    """Return rank and sequence number of a log file."""
    match = LOG_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _logs(version: Path) -> list[Path]:
    """List the turn logs of a version: in its folder ``turns``, or directly in a folder that the user chose."""
    return [
        p for place in (version / "turns", version) for p in place.glob("rank*.jsonl") if LOG_NAME.fullmatch(p.name)
    ]


def _versions(root: Path) -> set[Path]:
    folders = {p.parent for p in root.rglob("rank*.jsonl") if LOG_NAME.fullmatch(p.name)}
    return {folder.parent if folder.name == "turns" else folder for folder in folders}


def _newest(folders: set[Path]) -> Path:
    """Return the highest version next to the folder that was written last, since copying a run changes its times."""
    if len(folders) == 1:
        return next(iter(folders))
    latest = max(folders, key=lambda f: max((p.stat().st_mtime for p in f.rglob("*") if p.is_file()), default=0.0))
    return max((f for f in folders if f.parent == latest.parent), key=lambda f: (_number(f), f == latest))


def _number(folder: Path) -> int:
    match = _VERSION_NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _above(chosen: Path, root: Path) -> list[Path]:
    """Return the folders above a version whose files are about it: none once a newer version has overwritten them."""
    newer = [f for f in chosen.parent.glob("version_*") if _number(f) > _number(chosen) and _logs(f)]
    if newer:
        return []
    folders, folder = [], chosen
    inside = "lightning_logs"  # `run` itself may be a folder inside the run folder
    while (folder != root and folder.is_relative_to(root)) or _number(folder) >= 0 or folder.name == inside:
        folder = folder.parent
        folders.append(folder)
    return folders


def _first(name: str, places: Iterable[Path]) -> Path | None:
    """Return the file nearest to the version: anywhere below it, or directly in a folder above."""
    for i, place in enumerate(places):
        found = place.rglob(name) if i == 0 else place.glob(name)
        nearest = min(found, key=lambda p: (len(p.parts), str(p)), default=None)
        if nearest is not None:
            return nearest
    return None


def _name(chosen: Path) -> str:
    parts = [p for p in (chosen.parent.parent.name, chosen.parent.name, chosen.name) if p and p != "lightning_logs"]
    return " / ".join(parts[-2:] if _number(chosen) >= 0 else parts[-1:])


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
