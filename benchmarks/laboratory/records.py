"""Runs as files: one each, which is never half-written, and the record of all that the page is made of."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any

import torch

from benchmarks.laboratory.cells import Cell
from benchmarks.laboratory.measures import Run

Records = dict[str, Any]  # runs by their keys


def key(cell: Cell, arm: str, seed: int) -> str:
    """Return what tells a run apart from all that differ in what they would show; cells share arms that are equal."""
    settings = re.sub(r"<class '[\w.]+\.(\w+)'>", r"\1", repr((cell.start, cell.arms[arm], cell.iterations)))
    return f"{hashlib.sha256(settings.encode()).hexdigest()[:12]}-{seed}"


def keys(cell: Cell, first_seed: int = 0) -> dict[str, list[str]]:
    """Return the keys of the runs of a cell by arm."""
    seeds = range(first_seed, first_seed + cell.seeds)
    return {arm: [key(cell, arm, seed) for seed in seeds] for arm in cell.arms}


def keys_of(cells: Iterable[Cell], first_seed: int = 0) -> set[str]:
    """Return the keys of the runs of all these cells."""
    return {each for cell in cells for of_arm in keys(cell, first_seed).values() for each in of_arm}


def runs_of(cell: Cell, records: Records, first_seed: int = 0) -> dict[str, list[Run]] | None:
    """Return the runs of a cell by arm, of the seeds that every arm has; None: of fewer than half of its seeds."""
    by_seed = zip(*keys(cell, first_seed).values(), strict=True)
    whole = [of_seed for of_seed in by_seed if all(each in records for each in of_seed)]
    if 2 * len(whole) < cell.seeds:
        return None
    return {
        arm: [records[each] for each in of_arm] for arm, of_arm in zip(cell.arms, zip(*whole, strict=True), strict=True)
    }


def save(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    _save(path, lambda draft: draft.write_text(text))


def save_tensors(path: Path, tensors: Any) -> None:
    """Write a file of tensors as a whole or not at all."""
    _save(path, lambda draft: torch.save(tensors, draft))


def _save(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    write(draft)
    draft.replace(path)


def share(text: str) -> tuple[int, int]:
    """Read a share of the runs, such as ``1/2``: its number, from 1, and how many there are."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"a share is one of so many, such as 1/2 and 2/2, got '{text}'")
    return int(part), int(parts)


def load(folder: Path, record: Path | None, wanted: Set[str]) -> Records:
    """Return the runs with these keys, from the record, if any, and from the files of a folder, which win."""
    kept: Records = json.loads(record.read_text()) if record is not None and record.exists() else {}
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem in wanted}
    return {name: run for name, run in (kept | found).items() if name in wanted}


def as_text(records: Records) -> str:
    """One line a run."""
    lines = [f" {json.dumps(name)}: {json.dumps(run)}" for name, run in sorted(records.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"
