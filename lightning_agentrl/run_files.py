"""Files of a run: which folder is a run, its `run.json`, its turn logs. It imports the standard library only."""

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

LoggedTurn = dict[str, Any]  # keys as the callback TurnLog writes them; `prompt_ids` became the number `prompt_tokens`

_END_BYTES = 2**20  # of a log, in which its last whole line is looked for
PER_TOKEN = ("rollout_logps", "old_logps", "ref_logps", "values", "entropy", "advantages", "returns")
LOG_NAME = re.compile(r"rank(\d+)-(\d+)\.jsonl")
_TURNS, _HELD_OUT = "turns", "held_out"  # folders of the callback TurnLog
FACTS = "run.json"  # of runs that train; a validation writes none
_VERSION_NAME = re.compile(r"version_(\d+)")
_RUN_ID = re.compile(rb'{"iteration": ?\d+, ?"run_id": ?"(\w+)"')  # begins a line of a turn log
_LONGEST = 100  # bytes in which that lies


@dataclass(frozen=True)
class RunFiles:
    """The files of a run that were found. It has turn logs of at least one kind; all else may be missing.

    Those of other runs that were in its folder are left out.
    """

    name: str  # the run folder, with the version if it is one of several
    folder: Path  # that holds its turn logs
    logs: tuple[Path, ...]  # of trained turns, by rank, then in the order they were written
    held_out: tuple[Path, ...]  # of held-out episodes, likewise
    events: tuple[Path, ...]  # event files of TensorBoard
    tables: tuple[Path, ...]  # CSV files, of which some may hold curves
    summary: Path | None
    facts: Path | None  # run.json
    config: Path | None
    notes: tuple[str, ...]  # sentences for the reader of the page


def find_runs(root: Path) -> list[Path]:
    """Return the folders of all runs below a folder, also of those without a turn log.

    Raises:
        ValueError: ``root`` is not a folder.
    """
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise ValueError(f"'{root}' {what}; give the folder of a run")
    found: set[Path] = set()
    for folder, _, names in os.walk(root):  # passes over folders that go meanwhile, as those of checkpoints do
        found |= {Path(folder)} if FACTS in names else set()
        found |= {_run_of(Path(folder))} if any(map(LOG_NAME.fullmatch, names)) else set()
    return sorted(found)


def several(root: Path) -> bool:
    """Return whether the logged runs below a folder are more than versions of one, so that one must be chosen."""
    return len(_to_choose_from(root, _logged(find_runs(root)))) > 1


def find_run(run: Path, run_of: Callable[[Path], str] | None = None) -> RunFiles:
    """Find the newest version below ``run`` that has a turn log, and its other files.

    Args:
        run: folder of the run.
        run_of: reads the id of the run from a file; :func:`run_in` when not given.

    Raises:
        ValueError: ``run`` is not a folder, there is no turn log below it, or there are several runs to choose from.
    """
    runs = find_runs(run)
    logged = _logged(runs)
    if not logged:
        raise ValueError(
            f"there is no turn log below '{run}'; add the callback TurnLog to trainer.callbacks and run again"
        )
    if len(families := _to_choose_from(run, logged)) > 1:
        raise ValueError(f"there are several runs below '{run}'; choose one: {_listed(families, run)}")
    chosen = run if run in logged else max(logged, key=version_of)
    home, notes = _home(chosen, runs)
    if others := [folder for folder in logged if folder != chosen]:
        notes.append(
            f"{len(logged)} versions have turn logs; this is {_relative(chosen, run)}, the newest. "
            f"The command takes the folder of another one: {_listed(others, run)}."
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
        notes.append(f"Left out, as of another run that was in this folder: {_listed(left_out, chosen)}.")
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
    """Return the runs below a folder, those that differ in their version as one; none if the folder itself is one."""
    return [] if root in logged else sorted({run.parent if version_of(run) >= 0 else run for run in logged})


def turn_logs(run: Path) -> tuple[Path, ...]:
    """Return the logs of trained turns: in the run's folder ``turns``, or directly in a folder that the user chose."""
    return _logs(run / _TURNS) + _logs(run)


def held_out_logs(run: Path) -> tuple[Path, ...]:
    """Return the logs of held-out episodes, which lie in a folder beside those of trained turns."""
    return _logs(run / _TURNS / _HELD_OUT) + _logs(run / _HELD_OUT)


def log_order(path: Path) -> tuple[int, int]:
    """Return rank and sequence number of a log file."""
    match = LOG_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _logs(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted((p for p in folder.glob("rank*.jsonl") if LOG_NAME.fullmatch(p.name)), key=log_order))


def _run_of(folder: Path) -> Path:
    """Return the folder of the run whose logs are in this folder."""
    folder = folder.parent if folder.name == _HELD_OUT else folder
    return folder.parent if folder.name == _TURNS else folder


def _home(chosen: Path, runs: list[Path]) -> tuple[Path, list[str]]:
    """Return the folder of everything but the turn logs, which may lie in one that the user chose.

    Nothing is taken from a folder that could be another run's: a page never shows another run's result.
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
        f"Which of {len(others)} runs these turns are of cannot be told, so nothing else of it is shown; a TurnLog "
        "without a folder of its own writes into that of its run."
    ]


def version_of(folder: Path) -> int:
    """Return the number of a run among the versions beside it; -1 if its folder's name has none."""
    match = _VERSION_NAME.fullmatch(folder.name)
    return int(match[1]) if match else -1


@dataclass(frozen=True)
class Owner:
    """The run that a folder is of, where others may have been before.

    Args:
        run_id: its id, which its checkpoints keep; empty if nothing there tells it.
        began: a time before which nothing of it was written there; 0 if that is not known.
    """

    run_id: str
    began: float

    def owns(self, path: Path, run_id: str) -> bool:
        """Return whether a file is of this run: by the id in it, or where either has none, by when it was written."""
        if self.run_id and run_id:
            return run_id == self.run_id
        return not self.began or _written(path) >= self.began

    def own(self, paths: Iterable[Path], run_of: Callable[[Path], str] | None = None) -> tuple[Path, ...]:
        """Return those of the files that are of this run.

        Args:
            paths: the files.
            run_of: reads the id of the run from a file; :func:`run_in` when not given.
        """
        return tuple(path for path in paths if self.owns(path, (run_of or run_in)(path)))


def owner_of(home: Path, logged: Path | None = None) -> Owner:
    """Return the run that a folder is of: that of its run.json, or without one, as from Python, of its last turn log.

    Args:
        home: folder of the run.
        logged: that of its turn logs, if it is another one.
    """
    facts = json_object(home / FACTS)
    if not facts:
        return Owner(_newest_in(logged or home), 0.0)
    return Owner(str(facts.get("run_id", "")), _began(facts))


def _began(facts: dict[str, Any]) -> float:
    """Return a time before which nothing of a run was written; 0 if it went on from elsewhere."""
    try:
        return datetime.fromisoformat(facts["began"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return 0.0


def _newest_in(logged: Path) -> str:
    """Return the id of the run whose turns were logged last; the first process logs in every run."""
    logs = turn_logs(logged) or held_out_logs(logged)
    first = [path for path in logs if log_order(path)[0] == log_order(logs[0])[0]]
    return run_in(first[-1]) if first else ""


def run_in(path: Path) -> str:
    """Return the id of the run that wrote a turn log or a summary; empty if the file does not hold one."""
    if path.suffix == ".json":
        return str(json_object(path).get("run_id", ""))
    if not LOG_NAME.fullmatch(path.name):
        return ""
    try:
        with path.open("rb") as opened:
            begins = _RUN_ID.match(opened.read(_LONGEST))
        return begins[1].decode() if begins else ""
    except FileNotFoundError:  # rotated away, or removed
        return ""


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # rotated away
        return 0.0


def json_object(path: Path) -> dict[str, Any]:
    """Return a file's object; empty if it is not there, or not whole because it is being written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def environment_of(facts: Any) -> str:
    """Return what a run played, by its run.json; empty if that does not say so."""
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


def read_turns(
    logs: Iterable[Path], last: int | None = None, prompts: bool = False
) -> tuple[list[LoggedTurn], list[str]]:
    """Read all turns of all ranks, and return them with notes about what was left out.

    A resumed run plays some iterations again, and a new one in the same folder all of them; only the later version of
    them is kept. Entries in lists of numbers are None where a number was not finite.

    Args:
        logs: files by rank, then in the order in which they were written.
        last: number of iterations to keep, the last ones of each rank; all when not given.
        prompts: keep the ids of prompts, which take most of the memory.

    Raises:
        ValueError: a line that is not the last of its file is broken.
    """
    ranks: dict[int, list[LoggedTurn]] = {}
    notes: list[str] = []
    for path in logs if last is None else _of_the_last(logs, last):
        rank = log_order(path)[0]
        kept = ranks.setdefault(rank, [])
        for place, turn in enumerate(_read_file(path, notes, prompts)):
            again, newest = turn["iteration"], kept[-1]["iteration"] if kept else -1
            # A full file is followed by the next in the middle of an iteration, but then its first turn is a new one.
            begun_anew = place == 0 and again == newest and _is_in(turn, kept)
            if again < newest or begun_anew:
                how = (
                    f"played iteration {again} twice, as a run that begins anew in the same folder does"
                    if begun_anew
                    else f"went back from iteration {newest} to {again}, as a resumed run does"
                )
                notes.append(f"Rank {rank} {how}: what it had played there before is left out.")
                kept[:] = [old for old in kept if old["iteration"] < again]
            if last is not None and kept and turn["iteration"] > kept[-1]["iteration"]:
                kept[:] = [old for old in kept if old["iteration"] > turn["iteration"] - last]
            kept.append(turn)
    if last is not None:
        notes.append(f"Only the last {last} iterations of the log are shown.")
    return [turn for rank in sorted(ranks) for turn in ranks[rank]], notes


def _of_the_last(logs: Iterable[Path], last: int) -> list[Path]:
    """Return the files of each rank from the one on that holds the first of its last iterations.

    The files before it, which may have gigabytes, are not read.
    """
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
    """Return the iteration of a log's first or last turn; None if that line cannot be read."""
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
    """Return whether the same turn of the same episode is among those of its iteration."""
    which = ("iteration", "group", "env", "episode", "turn")
    return any(all(turn.get(key) == old.get(key) for key in which) for old in turns)


def _read_file(path: Path, notes: list[str], prompts: bool) -> Iterator[LoggedTurn]:
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: text may hold other line ends
    except FileNotFoundError:  # a run that is still going has rotated it away
        return
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:  # also from decoding
            if number == len(lines):
                notes.append(f"The last line of {path.name} was cut short and is left out.")
                return
            raise ValueError(
                f"line {number} of '{path}' is not JSON ({error}); remove that line or the file"
            ) from error
        prompt = record.get("prompt_ids") if prompts else record.pop("prompt_ids", None)
        yield {**record, "prompt_tokens": None if prompt is None else len(prompt)}
