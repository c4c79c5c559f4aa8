"""List of the runs below a folder, with one line per run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from lightning_agentrl.run_files import (
    FACTS,
    find_runs,
    held_out_logs,
    json_object,
    log_order,
    owner_of,
    turn_logs,
)

_TAIL = 1 << 20  # number of bytes at the end of a log that are searched for the last iteration


def list_runs(root: Path) -> str:
    """Return a table of all runs below a folder, most recent first.

    Raises:
        ValueError: ``root`` is not a folder, or contains no run.
    """
    runs = find_runs(root)
    if not runs:
        raise ValueError(f"there is no run below '{root}'")
    rows = sorted((_row(run) for run in runs), reverse=True)
    width = max(len(row[1]) for row in rows)
    lines = [f"  {path:<{width}}  {_minute(started):<16}  {result}" for started, path, result in rows]
    return "\n".join(
        [
            f"runs below {root}:",
            *lines,
            f"open one run: agentrl view {rows[0][1]}",
            "compare two runs: agentrl view A B",
        ]
    )


def _minute(started: str) -> str:
    """Return a time of run.json to the minute, in local time."""
    try:
        return datetime.fromisoformat(started).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError):
        return "start unknown"


def _row(run: Path) -> tuple[str, str, str]:
    """Return start time, folder and a summary of a run."""
    started = str(json_object(run / FACTS).get("started", ""))
    iterations = last_iteration(run)
    several = "s" if iterations > 1 else ""
    parts = [f"{iterations} iteration{several}" if iterations else "no iteration in its turn log"]
    summary = next(map(json_object, owner_of(run).own([run / "summary.json"])), {})
    results = (summary.get(when) for when in ("before", "after"))
    before, after = (result.get("success") if isinstance(result, dict) else None for result in results)
    if isinstance(before, int | float) and isinstance(after, int | float):
        parts.append(f"held-out success {before:.1%} before, {after:.1%} after")
    else:
        parts.append(
            "no held-out episodes in its summary" if summary else "no summary: not ended, or without RunSummary"
        )
    return started, os.path.relpath(run), ", ".join(parts)


def last_iteration(run: Path) -> int:
    """Return the last iteration in the turn log of a run, or 0 without turns.

    Held-out episodes count too, since iterations of a warm-up may log no training turns. Turns of an earlier run in
    the same folder do not count.
    """
    owner = owner_of(run)
    return max(_end(owner.own(logs)) for logs in (turn_logs(run), held_out_logs(run)))


def _end(logs: Sequence[Path]) -> int:
    """Return the last iteration in the logs of all ranks."""
    ends: dict[int, int] = {}
    for log in reversed(logs):  # begin with the newest log of each rank
        if (rank := log_order(log)[0]) not in ends and (end := _last_in(log)):
            ends[rank] = end
    return max(ends.values(), default=0)


def _last_in(log: Path) -> int:
    """Return the iteration of the last turn in a file, or 0 without turns."""
    try:
        with log.open("rb") as opened:
            size, tail = log.stat().st_size, _TAIL
            while True:
                opened.seek(max(0, size - tail))
                if found := re.findall(rb'^{"iteration": ?(\d+),', opened.read(), re.M):
                    return int(found[-1])
                if tail >= size:
                    return 0
                tail *= 8  # a line with a picture or a long prompt can be longer
    except FileNotFoundError:  # a running training may have rotated the log
        return 0
