"""Build the page of a run as one self-contained HTML file."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from lightning_agentrl.run_files import PER_TOKEN, LoggedTurn, RunFiles, environment_of, find_run, read_turns
from lightning_agentrl.tools.view.curves import curves_index, read_curves
from lightning_agentrl.tools.view.differences import different_keys
from lightning_agentrl.tools.view.episodes import Episode, group
from lightning_agentrl.tools.view.events import run_of_file
from lightning_agentrl.tools.view.quantities import QUANTITIES
from lightning_agentrl.tools.view.report import Report

_SCRIPTS = (
    *("format.js", "chunks.js", "pairs.js", "marks.js", "curves.js"),
    *("list.js", "tokens.js", "detail.js", "page.js"),
)
_LIVE = ("live.js",)
# Characters of JSON per chunk: few enough to unpack in milliseconds, and enough for gzip to work well.
_CHUNK_CHARACTERS = 300_000
_DIGITS = 5  # significant digits of numbers on the page
_TEXT = ("observation", "tokens", "reply")  # fields that the search reads
_DETAIL = (
    *("iteration", "phase", "turn", "policy_version", "continues", "prompt", "prompt_tokens", "reply_ids"),
    *("thought_tokens", "parsed_action", "action", "valid", "reward", "env_reward", "episode_return", "stop"),
    *("history_cuts", "hit_token_cap", "env_seconds", "engine_seconds", "env_errors", "metrics", "image"),
    "branch_returns",
    *PER_TOKEN,
)


def build_page(run: Path, out: Path | None = None, last: int | None = None, other: Path | None = None) -> Path:
    """Write the page of one run, or of two runs side by side, and return its path; see :func:`page_of`.

    Args:
        run: run folder, or version folder inside it; the newest of several versions with turn logs is shown.
        out: file to write. Default: ``view.html`` in ``run``, or ``compare.html`` for two runs.
        last: number of last iterations to show. Default: all. Size and build time grow with this number.
        other: folder of a second run.

    Raises:
        ValueError: as in :func:`page_of`, or ``out`` is a folder.
    """
    return _write(page_file(run, out, other), page_of(run, last, other))


def page_file(run: Path, out: Path | None, other: Path | None) -> Path:
    """Return the file of a page: ``out``, or the default of :func:`build_page`."""
    return run / ("view.html" if other is None else "compare.html") if out is None else out


def page_of(run: Path, last: int | None = None, other: Path | None = None, stamp: str = "") -> str:
    """Return the HTML of the page of one run, or of two runs side by side.

    The page opens from disk and loads no other files. The browser reads a small index at once, and unpacks compressed
    chunks of turns when an episode is opened or searched. This needs a browser with ``DecompressionStream``: Chrome and
    Edge 111, Firefox 113, Safari 16.4, or newer. The page of one run has its training turns and held-out episodes. The
    page of two runs has their curves in the same plots, and held-out episodes of the same seeds side by side.

    Args:
        run: run folder, or version folder inside it.
        last: number of last iterations to show. Default: all.
        other: folder of a second run.
        stamp: stamp of the current files; the page polls its server for a newer stamp, unless the stamp is empty.

    Raises:
        ValueError: a run has no turn log, or its turn log is empty or has an invalid line.
    """
    check_last(last)
    paths = [run] if other is None else [run, other]
    found = [find_run(path, run_of_file) for path in paths]
    names = [files.name for files in found]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    turns, notes, curves = [], [], []
    for name, known in zip(names, found, strict=True):
        own, about = _read(known, last, held_out_only=other is not None)
        logged, left_out = read_curves(known.events, known.tables)
        turns.append(own)
        curves.append(logged)
        notes += [f"{name}: {note}" if other else note for note in (*known.notes, *about, *left_out)]
    if other is None and not found[0].logs + found[0].held_out:
        raise ValueError(
            f"the turn log below '{run}' is of an earlier run; the last run in that folder has logged no turn: wait "
            "for its first iteration, or add the callback TurnLog to trainer.callbacks and run again"
        )
    if other is None and not turns[0]:
        raise ValueError(f"the turn log below '{run}' has no turn yet; build the page after the first iteration")
    iterations = [turn["iteration"] for own in turns for turn in own]
    configs, facts = [_config(known.config) for known in found], [_json_file(known.facts) for known in found]
    if len({env for env in map(environment_of, facts) if env}) > 1:
        notes.append(
            "The runs have different environments or arguments of environments: two held-out episodes side by side "
            "have the same seed, but maybe different games."
        )
    head = {
        "name": " and ".join(names),
        "notes": notes,
        "iterations": [min(iterations), max(iterations)] if iterations else [0, 0],
        "runs": [
            {"name": name, "summary": _json_file(known.summary), "facts": about, "config": config}
            for name, known, about, config in zip(names, found, facts, configs, strict=True)
        ],
        "differences": different_keys(*(known.config for known in found)) if other else [],
        "curves": curves_index(curves),
    }
    return _page(head, [episode for k, own in enumerate(turns) for episode in group(own, k)], stamp=stamp)


def check_last(last: int | None) -> None:
    """Check that the number of iterations to show is at least 1 or None.

    Raises:
        ValueError: the number is below 1.
    """
    if last is not None and last < 1:
        raise ValueError(f"--last must be at least 1, got {last}")


def _read(run: RunFiles, last: int | None, held_out_only: bool) -> tuple[list[LoggedTurn], list[str]]:
    """Return the training turns and held-out episodes of a run, with notes about what was left out."""
    trained, notes = ([], []) if held_out_only else read_turns(run.logs, last)
    held_out, more = read_turns(run.held_out)
    if last is not None and held_out:  # an episode of iteration N was played after N iterations
        newest = max(turn["iteration"] for turn in (*trained, *held_out))
        held_out = [turn for turn in held_out if turn["iteration"] > newest - last]
    if held_out_only and not held_out:
        more.append("There are no held-out episodes in its turn log.")
    return trained + held_out, notes + more


def build_report(
    name: str, reports: Sequence[Report], turns: Sequence[LoggedTurn], config: str, notes: Sequence[str], out: Path
) -> Path:
    """Write a page of reports with their episodes, turn by turn, and return its path.

    Args:
        name: title of the page.
        reports: reports at the top of the page.
        turns: at least one turn, all of iteration 1.
        config: text of the config, which the page can show.
        notes: notes for the reader.
        out: file to write.

    Raises:
        ValueError: ``out`` is a folder.
    """
    return build_comparison(name, reports, [(name, turns)], config, notes, out)


def build_comparison(
    name: str,
    reports: Sequence[Report],
    turns: Sequence[tuple[str, Sequence[LoggedTurn]]],
    config: str,
    notes: Sequence[str],
    out: Path,
) -> Path:
    """Write a page of reports with the episodes of several policies on the same seeds side by side; return its path.

    The arguments are those of :func:`build_report`, with name and turns of each policy. If there are several
    environments, ``source`` of a turn names its environment.
    """
    runs = [{"name": one, "summary": None, "facts": None, "config": None} for one, _ in turns]
    runs[0]["config"] = config or None
    head = {"name": name, "notes": notes, "iterations": None, "runs": runs, "differences": [], "curves": None}
    episodes = [episode for k, (_, own) in enumerate(turns) for episode in group(own, k)]
    return _write(out, _page(head, episodes, "".join(report.html() for report in reports)))


def _write(target: Path, text: str) -> Path:
    if target.is_dir():
        raise ValueError(f"'{target}' is a folder; name the file to write (argument --out)")
    data = text.encode("utf-8", "backslashreplace")  # replace lone surrogates, since file names may contain any bytes
    target.parent.mkdir(parents=True, exist_ok=True)
    place = target.resolve()
    if place.exists() and not place.is_file():  # the file may be a pipe or a terminal
        place.write_bytes(data)
        return target
    beside = place.with_name(f"{place.name}.part")
    try:
        beside.write_bytes(data)
        beside.replace(place)  # atomic, so that the page is never incomplete
    except OSError as error:
        with suppress(OSError):  # the folder may not be writable
            beside.unlink()
        raise OSError(error.errno, error.strerror, str(target)) from error
    return target


def _page(head: dict[str, Any], episodes: Sequence[Episode], report: str = "", stamp: str = "") -> str:
    turns = [turn for episode in episodes for turn in episode.turns]  # every turn once, in the order of episodes
    chunks, chunk_of = _chunks(episodes)
    rows = [{**episode.row(), "chunk": chunk} for episode, chunk in zip(episodes, chunk_of, strict=True)]
    index = {
        **head,
        "stamp": stamp,
        "turns": len(turns),
        "quantities": [quantity.scale(turns) for quantity in QUANTITIES],
        "episodes": {key: [row[key] for row in rows] for key in (rows[0] if rows else ())},
    }
    source = files(__package__)
    return Template(source.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(head["name"]),
        report=report,
        style=source.joinpath("page.css").read_text(encoding="utf-8"),
        index=_json(index).replace("<", "\\u003c"),  # escaped, so that no text closes the script tag
        connect="; connect-src 'self'" if stamp else "",
        script="\n".join(
            source.joinpath(name).read_text(encoding="utf-8") for name in (*_SCRIPTS, *(_LIVE if stamp else ()))
        ),
        chunks="\n".join(chunks),
    )


def _chunks(episodes: Sequence[Episode]) -> tuple[list[str], list[int]]:
    """Return script tags with the turns of adjacent episodes, and the chunk index of each episode.

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
    """Yield batches of about equal size, which contain the texts and details of each episode as JSON."""
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
        del text["reply"]  # the page joins the tokens to the reply
    return text


def _detail(turn: LoggedTurn) -> dict[str, Any]:
    return {key: turn[key] for key in _DETAIL if turn.get(key) is not None}


def _json(value: Any) -> str:
    """Return ASCII JSON with rounded numbers; NaN and infinities become texts for JavaScript's Number()."""
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


def _config(path: Path | None) -> str | None:
    return None if path is None else path.read_text(encoding="utf-8", errors="replace")


def _json_file(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"'{path}' is not JSON ({error}); remove it or write it again") from error
