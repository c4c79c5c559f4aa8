"""One run as a process of its own, and what is kept of it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.ablations.arms import BASE_CONFIG, as_arguments, fingerprints, overrides_of
from benchmarks.ablations.records import Job, Record
from benchmarks.quickstart_seeds import read_run

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 15  # of the log, in the record of a failed run
PATIENCE = 10.0  # seconds that a process has to end when told to
CURVES = ("rollout/success_window", "rollout/reward_per_turn", "critic/explained_variance", "kl/reference")


def command(job: Job, folder: Path) -> list[str]:
    fit = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", str(BASE_CONFIG)]
    own = [f"--seed_everything={job.seed}", f"--trainer.default_root_dir={folder}"]
    return [*fit, *as_arguments(overrides_of(job.arm)), *own]


def environment() -> dict[str, str]:
    """One thread a run, which is what makes several at once worthwhile; and the package of this repository."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}


def outcome(folder: Path) -> dict[str, Any]:
    """What a finished run wrote."""
    run = read_run(folder, CURVES)
    curves = {
        name: [[iteration, round(value, 6)] for iteration, value in points if math.isfinite(value)]
        for name, points in run.curves.items()
    }
    kept = {key: run.summary[key] for key in ("before", "after", "minutes")}
    return kept | {"curves": curves, "versions": run.facts["versions"], "machine": run.facts["machine"]}


def commit() -> str:
    """Of the repository, marked when code differs from it; the records themselves always do."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "lightning_agentrl", "envs", "benchmarks/ablations")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Running:
    """A started run. Its processes are a group of their own: Ctrl-C reaches only us, and we end all of them."""

    def __init__(self, job: Job, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier try
        folder.mkdir(parents=True)
        self.job, self.folder, self.log = job, folder, folder / "log.txt"
        self.about: Record = {
            "arm": job.arm,
            "seed": job.seed,
            "settings": fingerprints()[job.arm],  # as it starts: the file may change while it runs
            "overrides": overrides_of(job.arm),
            "commit": commit(),
        }
        self.started = time.monotonic()
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command(job, folder),
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def record(self) -> Record:
        """What to keep, once it has ended."""
        about = self.about | {"finished": datetime.now(UTC).isoformat(timespec="seconds")}
        if self.process.returncode == 0:
            try:
                return about | {"status": "done"} | outcome(self.folder)
            except (SystemExit, OSError, KeyError, ValueError) as error:
                reason = f"no usable result: {type(error).__name__}: {error}"
        else:
            reason = f"exit code {self.process.returncode}"
        tail = self.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        minutes = round((time.monotonic() - self.started) / 60, 2)
        return about | {"status": "failed", "reason": reason, "minutes": minutes, "log": tail}

    def tidy(self) -> None:
        """Weights are of no use afterwards, and large."""
        for path in self.folder.rglob("*.ckpt"):
            path.unlink()

    def stop(self) -> None:
        """End its processes, those that outlive the first one included; a second Ctrl-C only ends the patience."""
        try:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
