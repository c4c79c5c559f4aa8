"""Turn logs from disk: one checked dict per turn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning_agentrl.view.locate import log_order

LoggedTurn = dict[str, Any]  # keys as the callback TurnLog writes them; `prompt_ids` became the number `prompt_tokens`

_REQUIRED: dict[str, type] = {
    "iteration": int,
    "env": int,
    "episode": int,
    "turn": int,
    "reply_ids": list,
    "tokens": list,
    "reply": str,
    "observation": str,
}
_NUMBERS = {float, int, type(None)}
_END_BYTES = 2**20  # of a log, in which its last whole line is looked for
PER_TOKEN = ("rollout_logps", "old_logps", "ref_logps", "values", "entropy", "advantages", "returns")


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
            raise _broken(path, number, f"it is not JSON ({error})") from error
        except RecursionError:
            raise _broken(path, number, "it is nested too deeply") from None
        yield _checked(record, path, number, prompts)


def _checked(record: Any, path: Path, number: int, prompts: bool) -> LoggedTurn:
    if not isinstance(record, dict):
        raise _broken(path, number, "it is not a JSON object")
    for key, kind in _REQUIRED.items():
        if not isinstance(record.get(key), kind):
            raise _broken(path, number, f"'{key}' is missing or of another type")
    count = len(record["reply_ids"])
    for key in ("tokens", *PER_TOKEN):
        values = record.get(key)
        if values is not None and not isinstance(values, list):
            raise _broken(path, number, f"'{key}' is of another type")
        if values is not None and len(values) != count:
            raise _broken(path, number, f"'{key}' has {len(values)} entries for {count} reply tokens")
        if values and not set(map(type, values)) <= ({str} if key == "tokens" else _NUMBERS):
            raise _broken(path, number, f"'{key}' has entries of another type")
    for key in ("reward", "env_reward", "episode_return"):
        if type(record.get(key)) not in _NUMBERS:
            raise _broken(path, number, f"'{key}' is of another type")
    prompt = record.get("prompt_ids") if prompts else record.pop("prompt_ids", None)
    if not isinstance(prompt, list) and (prompts or prompt is not None):
        raise _broken(path, number, "'prompt_ids' is missing or of another type")
    for key, value in record.items():
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not {dict, list}.isdisjoint(map(type, inside)):
            raise _broken(path, number, f"'{key}' has entries of another type")
    return {**record, "prompt_tokens": None if prompt is None else len(prompt)}


def _broken(path: Path, number: int, why: str) -> ValueError:
    return ValueError(f"line {number} of '{path}' is broken: {why}; remove that line or the file")
