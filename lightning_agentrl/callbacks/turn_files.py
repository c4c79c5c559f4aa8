"""Files of JSON lines that are followed by the next when they are full, one series for each process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_agentrl.run_files import run_in

FILE_MB = 50.0  # a file is full at this many megabytes
KEPT = 20  # full files of a process; the oldest are removed


class TurnFiles:
    """The series ``rank<R>-<number>.jsonl`` of one process in a folder.

    It never goes on in the file of an earlier run, which may end in a broken line.

    Args:
        folder: made if it is not there.
        rank: of the process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rank = rank
        self._number: int | None = None  # of the file being written

    def cut(self, iteration: int, world: int, run_id: str) -> None:
        """Remove the turns of a run from an iteration on, of this rank and of those beyond the last that it stands for.

        Files of other runs stay as they are; one that was cut short before the id of its run counts as this run's.
        """
        for other in self._ranks(world):
            paths = (self._path(other, number) for number in reversed(self._numbers(other)))
            for path in paths:  # of a rank, iterations of a run only grow
                if run_in(path) in ("", run_id) and cut_from(path, iteration) > 0:
                    break

    def drop_gone(self, world: int) -> None:
        """Remove all files of the ranks beyond the last that this one stands for: of a run that was here before."""
        for other in self._ranks(world):
            if other >= world:
                for number in self._numbers(other):
                    self._path(other, number).unlink()

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add a line for each record; its first key must be the iteration."""
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it; the run is worth more
        if self._number is None:
            self._number = max(self._numbers(self.rank), default=-1) + 1
        first = self._number
        file = self._path(self.rank, self._number).open("a", encoding="utf-8")
        try:
            for record in records:
                if file.tell() >= FILE_MB * 1e6:
                    file.close()
                    self._number += 1
                    file = self._path(self.rank, self._number).open("a", encoding="utf-8")
                file.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n")
        finally:
            file.close()
        if self._number > first:
            for old in self._numbers(self.rank)[: -KEPT - 1]:
                self._path(self.rank, old).unlink()

    def _path(self, rank: int, number: int) -> Path:
        return self.folder / f"rank{rank}-{number:06d}.jsonl"

    def _ranks(self, world: int) -> list[int]:
        """Return the ranks with files that this one stands for, among so many processes."""
        found = (re.fullmatch(r"rank(\d+)-\d+\.jsonl", path.name) for path in self.folder.iterdir())
        return sorted({rank for match in found if match and (rank := int(match[1])) % world == self.rank})

    def _numbers(self, rank: int) -> list[int]:
        """Return the sorted numbers of the files of a rank."""
        found = (re.fullmatch(rf"rank{rank}-(\d+)\.jsonl", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)


def cut_from(log: Path, iteration: int) -> int:
    """Cut a log off before its first turn of this iteration or a later one, also a last line that is not whole.

    Returns:
        Bytes that are left; a log of which nothing is left is removed.
    """
    kept = 0
    with log.open("rb+") as opened:
        for line in opened:
            begun = re.match(rb'{"iteration":(\d+),', line)
            if begun is None or int(begun[1]) >= iteration or not line.endswith(b"\n"):
                break
            kept += len(line)
        opened.truncate(kept)
    if not kept:
        log.unlink()
    return kept
