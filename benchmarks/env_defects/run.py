"""Run `agentrl check-env` on five sound environments and on forty seeded defects, and print what it found.

    python benchmarks/env_defects/run.py runs/env_defects                  # all, one after the other
    python benchmarks/env_defects/run.py runs/env_defects --half open      # not those that are withheld
    python benchmarks/env_defects/run.py runs/env_defects KeyDoor          # ids with a word in them

Each answer is kept in the folder as a file of JSON, so a second call goes on where the first one ended. A defect is
found when a finding that concerns it is an error or a warning, or a notice if the defect is no more than that; a sound
environment passes without errors and warnings. Prints a table in Markdown with the counts of both halves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[0] = str(BENCHMARKS)  # in place of this folder, whose modules are those of a package

import env_defects  # noqa: E402, F401 - registers them
from env_defects.catalogue import DEFECTS, SOUND, Defect  # noqa: E402

LEVELS = ("error", "warning", "notice")
UNREAD = ("severity", "level", "mend", "hint", "fix", "advice", "remedy", "env", "environment")  # of a finding
LIMIT = 900.0  # seconds for one environment, after which it counts as hanging


def check(env_id: str, kwargs: Mapping[str, Any] | None = None, *options: str) -> dict[str, Any]:
    """Return the checker's report on an environment with exit code, seconds, and the end of what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(Path(sys.executable).parent / "agentrl"), "check-env", env_id, "--json", str(report)]
        command += [*(["--kwargs", json.dumps(kwargs)] if kwargs else []), *options]
        paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as printed:
            process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # also those that it started and left behind, and after Ctrl-C
                kill_group(process)
            printed.seek(0)
            told = printed.read()[-2000:]
        return {
            "id": env_id,
            "code": code,
            "seconds": round(time.monotonic() - began, 1),
            "told": told,
            "report": json.loads(report.read_text()) if report.is_file() else None,
        }


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kept(folder: Path, env_id: str) -> dict[str, Any]:
    """Return the report that the folder holds, after making it if it does not."""
    path = folder / f"{env_id.partition(':')[2]}.json"
    if not path.is_file():
        answer = check(env_id)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(answer, indent=1))
        part.replace(path)
    return json.loads(path.read_text())


def findings(node: Any) -> Iterator[tuple[str, str]]:
    """Yield level and text of each finding, wherever the report holds it."""
    if isinstance(node, dict):
        level = str(node.get("severity", node.get("level", ""))).lower()
        if level in LEVELS:
            said = " ".join(value for key, value in node.items() if isinstance(value, str) and key not in UNREAD)
            yield level, re.sub(r"env_defects:\S+", "", said)  # ids name the mistake
            return
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from findings(part)


def concerning(defect: Defect, answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the findings that count for a defect."""
    enough = LEVELS if defect.severity == "notice" else LEVELS[:2]
    found = findings(answer["report"])
    return [(level, text) for level, text in found if level in enough and re.search(defect.about, text, re.IGNORECASE)]


def shown(found: list[tuple[str, str]], answer: dict[str, Any]) -> str:
    if answer["report"] is None:
        lines = answer["told"].strip().splitlines()
        return cell(f"no report, exit code {answer['code']}: {lines[-1] if lines else ''}")
    return cell("; ".join(f"{level}: {text}" for level, text in found[:2]) or "nothing")


def cell(text: str) -> str:
    text = re.sub(r"([|\[\]])", r"\\\1", " ".join(text.split()))
    return text if len(text) <= 160 else f"{text[:157]}..."


def table(sound: dict[str, dict[str, Any]], flawed: dict[Defect, dict[str, Any]]) -> str:
    """Return the counts and a line for each environment."""
    lines = ["| sound environment | errors and warnings | seconds |", "|---|---|---|"]
    silent = 0
    for env_id, answer in sound.items():
        loud = [finding for finding in findings(answer["report"]) if finding[0] != "notice"]
        silent += not loud and answer["report"] is not None
        lines.append(f"| {env_id} | {shown(loud, answer)} | {answer['seconds']} |")
    rows = [
        "| defect | half | what is wrong | expected | found | evidence | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    counts = {"open": [0, 0], "withheld": [0, 0]}
    for defect, answer in flawed.items():
        hits = concerning(defect, answer)
        half = "withheld" if defect.withheld else "open"
        counts[half][0] += bool(hits)
        counts[half][1] += 1
        evidence = shown(hits or list(findings(answer["report"])), answer)
        found = hits[0][0] if hits else "no"
        row = (defect.id, half, cell(defect.text), defect.severity, found, evidence, str(answer["seconds"]))
        rows.append(f"| {' | '.join(row)} |")
    head = ["| half | found | of |", "|---|---|---|", *(f"| {half} | {a} | {b} |" for half, (a, b) in counts.items())]
    return "\n".join([*head, "", f"{silent} of {len(sound)} sound ones silent.", "", *lines, "", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where answers are kept")
    parser.add_argument("word", nargs="?", default="", help="only ids with it")
    parser.add_argument("--half", choices=("open", "withheld", "all"), default="all", help="which defects")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    wanted = [
        defect
        for defect in DEFECTS
        if given.word in defect.id and given.half in ("all", "withheld" if defect.withheld else "open")
    ]
    ids = [env_id for env_id in SOUND if given.word in env_id] + [defect.id for defect in wanted]
    answers = {}
    for number, env_id in enumerate(ids, start=1):
        print(f"{number} of {len(ids)}: {env_id}", file=sys.stderr)
        answers[env_id] = kept(given.folder, env_id)
    print(table({i: answers[i] for i in ids if i in SOUND}, {defect: answers[defect.id] for defect in wanted}))


if __name__ == "__main__":
    main()
