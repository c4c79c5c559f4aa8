"""Parts of a report, one after the other: each a command with a time limit, each kept as soon as it has ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

LAST_WORDS = 5  # seconds that a part has to end by itself once it is told to
ERROR = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt)\b|^agentrl: |^E   \w|^make: \*\*\*")


@dataclass(frozen=True)
class Part:
    """A measurement.

    Args:
        name: of the folder with its log and whatever it writes.
        title: what it measures, as the page calls it.
        command: does it; ends with 0 when the figures are there.
        minutes: after which it is ended.
        figures: reads them from the folder, in which `log.txt` is what the command said; a ValueError where they are
            missing.
        hindrance: says why the part cannot run on this machine, asked when its turn comes; None where it can.
        variables: of the command, besides those of this process.
    """

    name: str
    title: str
    command: tuple[str, ...]
    minutes: float
    figures: Callable[[Path], str]
    hindrance: Callable[[], str | None] = lambda: None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a part ended, and what the page says of it."""

    ended: Literal["done", "failed", "late", "cannot"]
    told: str  # figures, the last line of an error, or the reason why not
    seconds: float
    made: list[str]  # of what: the command, the machine
    when: str
    commit: str


def run_parts(
    parts: Sequence[Part], folder: Path, machine: str, commit: str, after_each: Callable[[], None]
) -> dict[str, Outcome]:
    """Run what has no figures of this command on this machine yet; what failed or was late is tried again.

    Args:
        parts: in their order.
        folder: in which each part has a folder.
        machine: figures of another one are not kept.
        commit: noted with the figures.
        after_each: called when a part has ended.
    """
    for part in parts:
        made = [*part.command, machine]
        kept = outcome_of(part, folder)
        if kept is not None and kept.ended == "done" and kept.made == made:
            print(f"{part.title}: kept, {kept.told}", flush=True)
            continue
        print(f"{part.title}: begins, {part.minutes:g} min at most", flush=True)
        started = time.monotonic()
        ended, figures = run(part, folder / part.name)
        now = datetime.now(UTC).isoformat(timespec="minutes")
        outcome = Outcome(ended, figures, round(time.monotonic() - started, 1), made, now, commit)
        draft = folder / part.name / "outcome.draft"
        draft.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        draft.replace(draft.with_suffix(".json"))
        print(f"{part.title}: {ended} after {outcome.seconds:.0f} s, {figures}", flush=True)
        after_each()
    return {part.name: outcome for part in parts if (outcome := outcome_of(part, folder)) is not None}


def outcome_of(part: Part, folder: Path) -> Outcome | None:
    """What was kept of a part; None if it has not run, or its file is not whole."""
    try:
        return Outcome(**json.loads((folder / part.name / "outcome.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def run(part: Part, folder: Path) -> tuple[Literal["done", "failed", "late", "cannot"], str]:
    """Run one part in an empty folder; how it ended, and what is told of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if (reason := part.hindrance()) is not None:
        return "cannot", reason
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command,
            env={**os.environ, **part.variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(part.minutes * 60)
        except subprocess.TimeoutExpired:
            return "late", f"ended after {part.minutes:g} min, its limit; its last line: {last_line(log)}"
        finally:
            end(process)
    if code:
        return "failed", last_line(log) or f"ended with {code} and said nothing"
    try:
        return "done", part.figures(folder)
    except (ValueError, KeyError, OSError) as error:
        return "failed", f"ended well, but without figures: {error}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a part with all the processes that it has started: by a request first, then by force."""
    for kind, seconds in ((signal.SIGTERM, LAST_WORDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(process.pid, kind)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def last_line(log: Path) -> str:
    """The last line of the last error, or where none is recognised the last one of all."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", log.read_text(errors="replace")).splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if ERROR.search(line)]
    return (errors or lines or [""])[-1][:400]
