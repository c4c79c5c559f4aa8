"""The page of a run as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_agentrl.view.curves import read_curves
from lightning_agentrl.view.episodes import Episode, group
from lightning_agentrl.view.locate import find_run
from lightning_agentrl.view.quantities import QUANTITIES
from lightning_agentrl.view.read import PER_TOKEN, LoggedTurn, read_turns
from lightning_agentrl.view.report import Report

_SCRIPTS = ("format.js", "chunks.js", "curves.js", "list.js", "tokens.js", "detail.js", "page.js")
_CHUNK_CHARACTERS = 300_000  # of JSON: unpacked in a few milliseconds, yet long enough for gzip to compress well
_DIGITS = 5  # significant digits; colours and the read-out of a token need no more
_TEXT = ("observation", "tokens", "reply")  # what the search reads
_DETAIL = (
    *("iteration", "phase", "turn", "policy_version", "continues", "prompt", "prompt_tokens", "reply_ids"),
    *("thought_tokens", "parsed_action", "action", "valid", "reward", "env_reward", "episode_return", "stop"),
    *("history_cuts", "hit_token_cap", "env_seconds", "engine_seconds", "env_errors", "metrics", "image"),
    *PER_TOKEN,
)


def build_page(run: Path, out: Path | None = None, last: int | None = None) -> Path:
    """Write the page of a run and return its path.

    The page opens from disk and loads nothing. A small index is read at once; turns lie in compressed chunks that the
    browser unpacks when an episode is opened or searched. This needs a browser with ``DecompressionStream``: Chrome and
    Edge 111, Firefox 113, Safari 16.4, or newer.

    Args:
        run: a run folder, or a version folder inside it; of several versions with turn logs the newest is shown.
        out: the file to write, ``view.html`` in ``run`` when not given.
        last: number of iterations to show, the last ones; all when not given. Size and build time grow with it.

    Raises:
        ValueError: when there is no turn log below ``run``, a line of it is broken, or ``out`` is a folder.
    """
    found = find_run(run)
    if last is not None and last < 1:
        raise ValueError(f"cannot show the last {last} iterations; give a number of at least 1 (argument --last)")
    turns, notes = read_turns(found.logs, last)
    if not turns:
        raise ValueError(f"the turn log below '{run}' holds no turn yet; build the page after the first iteration")
    iterations = [turn["iteration"] for turn in turns]
    head = {
        "name": found.name,
        "notes": [*found.notes, *notes],
        "iterations": [min(iterations), max(iterations)],
        "summary": _json_file(found.summary),
        "facts": _json_file(found.facts),
        "config": None if found.config is None else found.config.read_text(encoding="utf-8", errors="replace"),
        "curves": read_curves(found.events),
    }
    return _write(run / "view.html" if out is None else out, head, turns)


def build_report(
    name: str, reports: Sequence[Report], turns: Sequence[LoggedTurn], config: str, notes: Sequence[str], out: Path
) -> Path:
    """Write a page of reports with the episodes that they are about, turn by turn, and return its path.

    Args:
        name: title of the page.
        reports: at its top.
        turns: at least one, all of iteration 1.
        config: text of the configuration, which can be unfolded.
        notes: sentences for the reader.
        out: the file to write.

    Raises:
        ValueError: ``out`` is a folder.
    """
    head = {"name": name, "notes": notes, "iterations": None, "summary": None, "facts": None, "config": config}
    return _write(out, {**head, "curves": None}, turns, "".join(report.html() for report in reports))


def _write(target: Path, head: dict[str, Any], turns: Sequence[LoggedTurn], report: str = "") -> Path:
    if target.is_dir():
        raise ValueError(f"'{target}' is a folder; name the file to write (argument --out)")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_page(head, turns, report), encoding="utf-8")
    return target


def _page(head: dict[str, Any], turns: Sequence[LoggedTurn], report: str) -> str:
    episodes = group(turns)
    turns = [turn for episode in episodes for turn in episode.turns]  # each turn once
    chunks, chunk_of = _chunks(episodes)
    rows = [{**episode.row(), "chunk": chunk} for episode, chunk in zip(episodes, chunk_of, strict=True)]
    index = {
        **head,
        "turns": len(turns),
        "quantities": [quantity.scale(turns) for quantity in QUANTITIES],
        "episodes": {key: [row[key] for row in rows] for key in rows[0]},
    }
    source = files(__package__)
    return Template(source.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(head["name"]),
        report=report,
        style=source.joinpath("page.css").read_text(encoding="utf-8"),
        index=_json(index).replace("<", "\\u003c"),  # no text of a run can close the script tag
        script="\n".join(source.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS),
        chunks="\n".join(chunks),
    )


def _chunks(episodes: Sequence[Episode]) -> tuple[list[str], list[int]]:
    """Return script tags with the turns of neighbouring episodes, and the chunk number of each episode.

    A chunk is two tags, ``text-N`` and ``detail-N``, so that a search unpacks only the texts.
    """
    tags: list[str] = []
    chunk_of: list[int] = []
    for number, members in enumerate(_batches(episodes)):
        chunk_of += [number] * len(members)
        for kind, parts in zip(("text", "detail"), zip(*members, strict=True), strict=True):
            packed = base64.b64encode(gzip.compress(f"[{','.join(parts)}]".encode("ascii"), mtime=0)).decode("ascii")
            tags.append(f'<script type="application/octet-stream" id="{kind}-{number}">{packed}</script>')
    return tags, chunk_of


def _batches(episodes: Sequence[Episode]) -> Iterator[list[tuple[str, str]]]:
    """Yield texts and details of each episode as JSON, in batches of about equal size."""
    batch: list[tuple[str, str]] = []
    size = 0
    for episode in episodes:
        pair = _json([_text(turn) for turn in episode.turns]), _json([_detail(turn) for turn in episode.turns])
        batch.append(pair)
        size += len(pair[0]) + len(pair[1])
        if size >= _CHUNK_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _text(turn: LoggedTurn) -> dict[str, Any]:
    text = {key: turn[key] for key in _TEXT}
    if text["reply"] == "".join(text["tokens"]):
        del text["reply"]  # the page joins the tokens itself
    return text


def _detail(turn: LoggedTurn) -> dict[str, Any]:
    return {key: turn[key] for key in _DETAIL if turn.get(key) is not None}


def _json(value: Any) -> str:
    """Return ASCII JSON with short numbers; NaN and infinities become text that JavaScript's Number() reads."""
    return json.dumps(_short(value), separators=(",", ":"))


def _short(value: Any) -> Any:
    if isinstance(value, float):
        if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        short = float(f"{value:.{_DIGITS}g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return value


def _json_file(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"'{path}' is not JSON ({error}); remove it or write it again") from error
