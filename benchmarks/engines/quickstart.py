"""The quickstart with the engines of transformers and of vLLM, seed by seed: success and time. Needs vLLM.

    python -m benchmarks.engines.quickstart                           # three seeds, both engines
    python -m benchmarks.engines.quickstart --seeds 0 --out /tmp/try -- --trainer.max_epochs 3   # a short try
    python -m benchmarks.engines.quickstart --report                  # the page alone, from the records

Each run is a process of its own, and the two of a seed follow each other, so that whatever else the machine does meets
both. A record is written as a run ends; what has a record with the same settings is not run again, so this can be
stopped at any time. Writes `quickstart_engines.json` and `quickstart_engines.md`. What stands behind `--` is given to
all runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.engines.quickstart_page import ENGINES, page
from benchmarks.intervals import Record
from benchmarks.quickstart_seeds import read_run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
STAGES = ("iteration", "collect", "sync", "score", "update", "log")
LAST_LINES = 15  # of the log of a run that has failed


def config_of(engine: str) -> Path:
    return ROOT / ENGINES[engine]


def order(seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Engine and seed of each run; either engine is the first one by turns."""
    names = list(ENGINES)
    return [(name, seed) for place, seed in enumerate(seeds) for name in (names[::-1] if place % 2 else names)]


def fingerprint(engine: str, arguments: Sequence[str]) -> str:
    """Of all settings of a run but its seed."""
    settings = json.dumps([yaml.safe_load(config_of(engine).read_text()), list(arguments)])
    return hashlib.sha256(settings.encode()).hexdigest()[:12]


def run(engine: str, seed: int, arguments: Sequence[str], folder: Path) -> Record:
    """One run from an empty folder; its weights are not kept.

    Raises:
        SystemExit: with the end of its log, if it has failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about = {"engine": engine, "seed": seed, "settings": fingerprint(engine, arguments), "arguments": list(arguments)}
    own = [f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}"]
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", str(config_of(engine)), *own, *arguments]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log, started = folder / "log.txt", time.monotonic()
    with log.open("w") as output:
        environment = os.environ | {"PYTHONPATH": path}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait()
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
    minutes = (time.monotonic() - started) / 60
    for weights in folder.rglob("*.ckpt"):
        weights.unlink()
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise SystemExit(f"{engine} seed {seed} ended with {code}:\n{tail}\nthe whole log is {log}")
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    return about | {"commit": commit(), "finished": finished, "process_minutes": round(minutes, 2)} | outcome(folder)


def commit() -> str:
    """Return the commit of the repository, marked when code differs from it; the records themselves always do."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "lightning_agentrl", "envs", "benchmarks")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def outcome(folder: Path) -> dict[str, Any]:
    """What a finished run wrote."""
    run = read_run(folder, [f"time/{stage}_seconds" for stage in STAGES])
    iterations: dict[int, dict[str, float]] = {}
    for name, points in run.curves.items():
        stage = name.removeprefix("time/").removesuffix("_seconds")
        for iteration, seconds in points:
            iterations.setdefault(iteration, {})[stage] = round(seconds, 6)
    kept = {key: run.summary[key] for key in ("before", "after", "minutes")}
    machine = run.facts["machine"] | {"cores": os.cpu_count()}
    kept |= {"iterations": [iterations[number] for number in sorted(iterations)]}
    return kept | {"versions": run.facts["versions"], "machine": machine}


class Records:
    """One JSON file: a note on how the runs were made, and the runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        saved = json.loads(path.read_text()) if path.exists() else {}
        self.note: str = saved.get("note", "")
        self.runs: list[Record] = saved.get("runs", [])

    def current(self, arguments: Sequence[str]) -> list[Record]:
        """Those that were made with the settings of today."""
        wanted = {engine: fingerprint(engine, arguments) for engine in ENGINES}
        return [record for record in self.runs if record["settings"] == wanted[record["engine"]]]

    def add(self, record: Record) -> None:
        """In place of an older record of the same run."""
        key = (record["engine"], record["seed"])
        self.runs = [old for old in self.runs if (old["engine"], old["seed"]) != key] + [record]
        self.runs.sort(key=lambda record: (record["seed"], list(ENGINES).index(record["engine"])))

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({"note": self.note, "runs": self.runs}, indent=1) + "\n")
        draft.replace(self.path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the page and the records")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "quickstart_engines", help="of logs and events")
    parser.add_argument("--note", help="a sentence on how the runs were made, kept with the records")
    parser.add_argument("--report", action="store_true", help="write the page from the records, run nothing")
    given = list(sys.argv[1:] if arguments is None else arguments)
    place = given.index("--") if "--" in given else len(given)
    chosen, settings = parser.parse_args(given[:place]), given[place + 1 :]
    if settings and chosen.out.resolve() == RESULTS:
        parser.error("runs with settings of your own need another folder for their page: --out")
    records = Records(chosen.out / "quickstart_engines.json")
    if chosen.note is not None:
        records.note = chosen.note
    there = {(record["engine"], record["seed"]) for record in records.current(settings)}
    for engine, seed in () if chosen.report else order(chosen.seeds):
        if (engine, seed) in there:
            print(f"{engine} seed {seed} is there", flush=True)
            continue
        print(f"{engine} seed {seed} begins", flush=True)
        record = run(engine, seed, settings, (chosen.runs / f"{engine}-seed{seed}").resolve())
        records.add(record)
        records.write()
        before, after = (record[when]["success"] for when in ("before", "after"))
        print(f"success {before:.2f} -> {after:.2f} in {record['process_minutes']:.1f} minutes", flush=True)
    records.write()
    text = page(records.current(settings), records.note, settings)
    (chosen.out / "quickstart_engines.md").write_text(text)
    print(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends us ends the run as well
    main()
