"""The records of finished and failed runs: one JSON file in the repository, one line a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ablations.arms import ARMS, fingerprints

Record = dict[str, Any]


@dataclass(frozen=True, order=True)
class Job:
    """One run. Sorting puts the first seed of every arm before all second ones."""

    seed: int
    place: int  # of the arm among the arms

    @classmethod
    def of(cls, arm: str, seed: int) -> Job:
        return cls(seed, ARMS.index(arm))

    @property
    def arm(self) -> str:
        return ARMS[self.place]

    def __str__(self) -> str:
        return f"{self.arm} seed {self.seed}"


class Records:
    """The file is read anew at each use, since it may be changed or merged between two runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[Job, Record]:
        """All records of arms that are still there."""
        lines = json.loads(self.path.read_text()) if self.path.exists() else []
        return {Job.of(record["arm"], record["seed"]): record for record in lines if record["arm"] in ARMS}

    def current(self, status: str = "done") -> dict[Job, Record]:
        """Those whose settings have not changed since."""
        wanted = fingerprints()
        return {
            job: record
            for job, record in sorted(self.read().items())
            if record["status"] == status and record["settings"] == wanted[job.arm]
        }

    def missing(self, arms: Iterable[str], seeds: Iterable[int]) -> list[Job]:
        """What has not been run with these settings or has failed, in the order to run it."""
        done = self.current()
        arms = list(arms)
        return sorted(job for seed in set(seeds) for arm in set(arms) if (job := Job.of(arm, seed)) not in done)

    def add(self, record: Record) -> None:
        """Replace the record of the same run. The file is whole at any time."""
        records = self.read() | {Job.of(record["arm"], record["seed"]): record}
        lines = [json.dumps(records[job], allow_nan=False) for job in sorted(records)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        os.replace(draft, self.path)
