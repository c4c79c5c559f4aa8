"""Files of a run: find run folders, and read `run.json` and turn logs. Imports the standard library only."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

LoggedTurn = dict[str, Any]  # a line of the callback TurnLog, plus `prompt_tokens`, the length of `prompt_ids`

_END_BYTES = 2**20  # bytes at the end of a log that are searched for the last complete line
PER_TOKEN = ("rollout_logps", "old_logps", "ref_logps", "values", "entropy", "advantages", "returns")
LOG_NAME = re.compile(r"rank(\d+)-(\d+)\.jsonl")
_TURNS, _HELD_OUT = "turns", "held_out"  # folders of the callback TurnLog
FACTS = "run.json"  # training runs write this file; validations do not
_VERSION_NAME = re.compile(r"version_(\d+)")
_RUN_ID = re.compile(rb'{"iteration": ?\d+, ?"run_id": ?"(\w+)"')  # start of a line in a turn log
_LONGEST = 100  # bytes to read at the start of a line, to match _RUN_ID


@dataclass(frozen=True)
class RunFiles:
    """The existing files of a run, which has at least one turn log; other files may be missing.

    Files that other runs left in the same folder are excluded.
    """

    name: str  # name of the run folder, with its version if the run has several versions
    folder: Path  # folder with the turn logs
    logs: tuple[Path, ...]  # logs of trained turns, by rank, then in the order of writing
    held_out: tuple[Path, ...]  # logs of held-out episodes, by rank, then in the order of writing
    events: tuple[Path, ...]  # event files of TensorBoard
    tables: tuple[Path, ...]  # CSV files, some of which may have metrics
    summary: Path | None
    facts: Path | None  # run.json
    config: Path | None
    notes: tuple[str, ...]  # notes for the reader of the page


def find_runs(root: Path) -> list[Path]:
    """Return the folders of all runs in or below a folder, including runs without a turn log.

    Raises:
        ValueError: ``root`` is not a folder.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise ValueError(f"'{root}' {what}; name the folder of a run")
    found: set[Path] = set()
    for folder, _, names in os.walk(root):  # os.walk skips folders that are removed meanwhile, such as checkpoints
        found |= {Path(folder)} if FACTS in names else set()
        found |= {_run_of(Path(folder))} if any(map(LOG_NAME.fullmatch, names)) else set()
    return sorted(found)


def several(root: Path) -> bool:
    """Return whether a folder has turn logs of several runs (versions are not counted), so the user must choose one."""
    return len(_to_choose_from(root, _logged(find_runs(root)))) > 1


def find_run(run: Path, run_of: Callable[[Path], str] | None = None) -> RunFiles:
    """Find the newest version of a run with a turn log, in or below ``run``, and the other files of that version.

    Args:
        run: folder of the run.
        run_of: function that reads the run id from a file; :func:`run_in` by default.

    Raises:
        ValueError: ``run`` is not a folder, there is no turn log below it, or there are several runs to choose from.
    """
    runs = find_runs(run)
    logged = _logged(runs)
    if not logged:
        raise ValueError(
            f"there is no turn log below '{run}'; add the callback TurnLog to trainer.callbacks and start the run again"
        )
    if len(families := _to_choose_from(run, logged)) > 1:
        raise ValueError(f"there are several runs below '{run}'; choose one: {_listed(families, run)}")
    chosen = run if run in logged else max(logged, key=version_of)
    home, notes = _home(chosen, runs)
    if others := [folder for folder in logged if folder != chosen]:
        notes.append(
            f"{len(logged)} versions have turn logs; this is {_relative(chosen, run)}, the newest. "
            f"To see another one, pass its folder to the command: {_listed(others, run)}."
        )
    beside = [folder for folder in runs if folder not in logged and folder.parent == chosen.parent]
    if later := [folder for folder in beside if version_of(folder) > version_of(chosen)]:
        notes.append(f"Started later and without a turn log: {_listed(later, run)}.")
    owner = owner_of(home, chosen)
    found = {
        "logs": turn_logs(chosen),
        "held_out": held_out_logs(chosen),
        "events": tuple(sorted(home.glob("events.out.tfevents.*"))),
        "tables": tuple(sorted(home.glob("*.csv"))),
        "summary": tuple(filter(Path.is_file, [home / "summary.json"])),
    }
    own = {kind: owner.own(paths, run_of) for kind, paths in found.items()}
    if left_out := [path for kind, paths in found.items() for path in paths if path not in own[kind]]:
        notes.append(f"Left out, since another run wrote it to this folder: {_listed(left_out, chosen)}.")
    return RunFiles(
        name=_name(chosen.resolve()),
        folder=chosen,
        logs=own["logs"],
        held_out=own["held_out"],
        events=own["events"],
        tables=own["tables"],
        summary=next(iter(own["summary"]), None),
        facts=_existing(home / FACTS),
        config=_existing(home / "config.yaml"),
        notes=tuple(notes),
    )


def _logged(runs: Iterable[Path]) -> list[Path]:
    return [folder for folder in runs if turn_logs(folder) or held_out_logs(folder)]


def _to_choose_from(root: Path, logged: Iterable[Path]) -> list[Path]:
    """Return the runs below a folder, with versions of a run merged; an empty list if the folder itself is a run."""
    return [] if root in logged else sorted({run.parent if version_of(run) >= 0 else run for run in logged})


def turn_logs(run: Path) -> tuple[Path, ...]:
    """Return the logs of trained turns, in the run's subfolder ``turns`` or directly in a folder the user chose."""
    return _logs(run / _TURNS) + _logs(run)


def held_out_logs(run: Path) -> tuple[Path, ...]:
    """Return the logs of held-out episodes, in a subfolder of the logs of trained turns."""
    return _logs(run / _TURNS / _HELD_OUT) + _logs(run / _HELD_OUT)


def log_order(path: Path) -> tuple[int, int]:
    """Return rank and sequence number of a log file."""
    match = LOG_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _logs(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted((p for p in folder.glob("rank*.jsonl") if LOG_NAME.fullmatch(p.name)), key=log_order))


def _run_of(folder: Path) -> Path:
    """Return the folder of the run, given the folder of its logs."""
    folder = folder.parent if folder.name == _HELD_OUT else folder
    return folder.parent if folder.name == _TURNS else folder


def _home(chosen: Path, runs: list[Path]) -> tuple[Path, list[str]]:
    """Return the folder with a run's files other than turn logs, and notes for the reader of the page.

    The user may have chosen a folder for turn logs outside the run's folder. A folder that may belong to another run is
    not used, so that a page never shows another run's results.

    Args:
        chosen: folder with the turn logs.
        runs: folders of all runs that were found.
    """
    own = bool(_logs(chosen / _TURNS) or _logs(chosen / _TURNS / _HELD_OUT)) or (chosen / FACTS).exists()
    others = [folder for folder in runs if (folder / FACTS).exists()]
    if own or not others:
        return chosen, []
    newest = _newest_in(chosen)
    if known := [folder for folder in others if newest and owner_of(folder).run_id == newest]:
        return max(known, key=version_of), []
    if len(others) == 1:
        return others[0], []
    return chosen, [
        f"It is unknown to which of {len(others)} runs these turns belong, so none of their other files are shown; a "
        "TurnLog without the argument folder writes to the folder of its run."
    ]


def version_of(folder: Path) -> int:
    """Return the version number in the name of a run's folder; -1 if the name has none."""
    match = _VERSION_NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class Owner:
    """The run that owns a folder, which may contain files of earlier runs.

    Args:
        run_id: id of the run, also stored in its checkpoints; empty if unknown.
        began: time before which the run wrote nothing to the folder; 0 if unknown.
    """

    run_id: str
    began: float

    def owns(self, path: Path, run_id: str) -> bool:
        """Return whether a file belongs to this run: by run id or, if an id is unknown, by the time of writing."""
        if self.run_id and run_id:
            return run_id == self.run_id
        return not self.began or _written(path) >= self.began

    def own(self, paths: Iterable[Path], run_of: Callable[[Path], str] | None = None) -> tuple[Path, ...]:
        """Return the files that belong to this run.

        Args:
            paths: files to choose from.
            run_of: function that reads the run id from a file; :func:`run_in` by default.
        """
        return tuple(path for path in paths if self.owns(path, (run_of or run_in)(path)))


def owner_of(home: Path, logged: Path | None = None) -> Owner:
    """Return the run that owns a folder, from run.json or, if that file is missing (runs in Python), the last turn log.

    Args:
        home: folder of the run.
        logged: folder of the run's turn logs, if it differs from ``home``.
    """
    facts = json_object(home / FACTS)
    if not facts:
        return Owner(_newest_in(logged or home), 0.0)
    return Owner(str(facts.get("run_id", "")), _began(facts))


def _began(facts: dict[str, Any]) -> float:
    """Return the time before which a run wrote nothing; 0 if it was resumed from another folder."""
    try:
        return datetime.fromisoformat(facts["began"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return 0.0


def _newest_in(logged: Path) -> str:
    """Return the id of the run that logged last, from the logs of the lowest rank, since it logs in every run."""
    logs = turn_logs(logged) or held_out_logs(logged)
    first = [path for path in logs if log_order(path)[0] == log_order(logs[0])[0]]
    return run_in(first[-1]) if first else ""


def run_in(path: Path) -> str:
    """Return the run id in a turn log or a summary; empty if the file has none."""
    if path.suffix == ".json":
        return str(json_object(path).get("run_id", ""))
    if not LOG_NAME.fullmatch(path.name):
        return ""
    try:
        with path.open("rb") as opened:
            begins = _RUN_ID.match(opened.read(_LONGEST))
        return begins[1].decode() if begins else ""
    except FileNotFoundError:  # the file was removed meanwhile
        return ""


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # the file was removed meanwhile
        return 0.0


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or incomplete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def environment_of(facts: Any) -> str:
    """Return the environment of a run, given its run.json; empty if it is not recorded."""
    rollout = facts.get("rollout") if isinstance(facts, dict) else None
    return str(rollout.get("env", "")) if isinstance(rollout, dict) else ""


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def _name(chosen: Path) -> str:
    parts = [p for p in (chosen.parent.parent.name, chosen.parent.name, chosen.name) if p and p != "lightning_logs"]
    return " / ".join(parts[-2:] if version_of(chosen) >= 0 else parts[-1:])


def _listed(paths: Iterable[Path], root: Path) -> str:
    return ", ".join(sorted(_relative(path, root) for path in paths))


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def one_run(folder: Path, holds: str) -> Path:
    """Return a folder if it belongs to a run, or else the newest version of the only run below it, like `agentrl view`.

    Args:
        folder: folder that the user named.
        holds: name of a file or folder that marks the folder of a run.

    Raises:
        ValueError: the folder does not exist, or there is no run or several runs below it.
    """
    if not folder.is_dir():
        raise ValueError(f"the folder '{folder}' does not exist; name the folder of a run")
    if (folder / holds).exists():
        return folder
    found = sorted(path.parent for path in folder.glob(f"**/{holds}"))
    if not found:
        raise ValueError(f"no {holds} is in or below '{folder}'; name the folder of a run that wrote one")
    if len(found) > 1 and (len({run.parent for run in found}) > 1 or min(map(version_of, found)) < 0):
        listed = ", ".join(str(run.relative_to(folder)) for run in found)
        raise ValueError(f"there are several runs below '{folder}'; name the folder of one: {listed}")
    return max(found, key=version_of)


def read_turns(
    logs: Iterable[Path], last: int | None = None, prompts: bool = False
) -> tuple[list[LoggedTurn], list[str]]:
    """Read the turns of all ranks; return them with notes about omitted turns.

    A resumed run plays some iterations again, and a new run in the same folder plays all iterations again; only the
    later version of an iteration is kept. Entries in lists of numbers are None if the number was not finite.

    Args:
        logs: files by rank, then in the order of writing.
        last: number of last iterations of each rank to read; None: all iterations.
        prompts: whether to keep the token ids of prompts, which take most of the memory.

    Raises:
        ValueError: a line other than the last line of a file is broken.
    """
    ranks: dict[int, list[LoggedTurn]] = {}
    notes: list[str] = []
    for path in logs if last is None else _of_the_last(logs, last):
        rank = log_order(path)[0]
        kept = ranks.setdefault(rank, [])
        for place, turn in enumerate(_read_file(path, notes, prompts)):
            again, newest = turn["iteration"], kept[-1]["iteration"] if kept else -1
            # A file may begin within an iteration because the previous file was full, but then its first turn is not a
            # repeat.
            begun_anew = place == 0 and again == newest and _is_in(turn, kept)
            if again < newest or begun_anew:
                how = (
                    f"played iteration {again} twice, as a new run in the same folder does"
                    if begun_anew
                    else f"went back from iteration {newest} to {again}, as a resumed run does"
                )
                notes.append(f"Rank {rank} {how}: the earlier turns of these iterations are left out.")
                kept[:] = [old for old in kept if old["iteration"] < again]
            if last is not None and kept and turn["iteration"] > kept[-1]["iteration"]:
                kept[:] = [old for old in kept if old["iteration"] > turn["iteration"] - last]
            kept.append(turn)
    if last is not None:
        notes.append(f"Only the last {last} iterations of the log are shown.")
    return [turn for rank in sorted(ranks) for turn in ranks[rank]], notes


def _of_the_last(logs: Iterable[Path], last: int) -> list[Path]:
    """Return the files with the last iterations of each rank, so that earlier files, maybe gigabytes, are not read."""
    ranks: dict[int, list[Path]] = {}
    for path in logs:
        ranks.setdefault(log_order(path)[0], []).append(path)
    kept: list[Path] = []
    for paths in ranks.values():
        newest = next((i for path in reversed(paths) if (i := _iteration(path, at_end=True)) is not None), math.inf)
        firsts = [_iteration(path) for path in paths]
        before = [place for place, first in enumerate(firsts) if first is not None and first <= newest - last]
        kept += paths[before[-1] if before and newest < math.inf else 0 :]
    return kept


def _iteration(path: Path, at_end: bool = False) -> int | None:
    """Return the iteration of the first or last turn in a log; None if the line cannot be read."""
    try:
        with path.open("rb") as log:
            if at_end:
                log.seek(max(0, path.stat().st_size - _END_BYTES))
            lines = [line for line in log if line.endswith(b"\n")] if at_end else [log.readline()]
        found = json.loads(lines[-1])["iteration"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if isinstance(found, int) else None


def _is_in(turn: LoggedTurn, turns: Iterable[LoggedTurn]) -> bool:
    """Return whether turns contain the same turn of the same episode and iteration."""
    which = ("iteration", "group", "env", "episode", "turn")
    return any(all(turn.get(key) == old.get(key) for key in which) for old in turns)


def _read_file(path: Path, notes: list[str], prompts: bool) -> Iterator[LoggedTurn]:
    try:
        # `splitlines` would also split at other line separators, which texts may contain.
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:  # a run that is still writing has removed the file
        return
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:  # invalid JSON or invalid UTF-8
            if number == len(lines):
                notes.append(f"The last line of {path.name} was cut short and is left out.")
                return
            raise ValueError(
                f"line {number} of '{path}' is not JSON ({error}); remove that line or the file"
            ) from error
        prompt = record.get("prompt_ids") if prompts else record.pop("prompt_ids", None)
        yield {**record, "prompt_tokens": None if prompt is None else len(prompt)}
