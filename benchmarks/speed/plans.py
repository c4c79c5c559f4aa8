"""The memory plan of `--dry-run` against the peak of the same run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.speed.contender import ROOT

# One warm-up iteration and three in which everything is trained; no held-out episodes, no files.
SHORT_RUN = (
    "--trainer.max_epochs=4",
    "--trainer.enable_checkpointing=false",
    "--trainer.callbacks=[{class_path: CriticWarmup, init_args: {rollouts: 1, rounds: 1, fraction: 1.0}}]",
)
PLANS: dict[str, tuple[str, ...]] = {
    "quickstart": (),
    "quickstart with micro-batches of 4096 tokens": ("--model.init_args.compute.max_tokens_per_micro_batch=4096",),
    "quickstart with a separate critic": ("--model.init_args.critic=SeparateCritic",),
}


def measure_plan(options: Sequence[str]) -> dict[str, float]:
    """Bytes foretold and bytes taken."""
    printed, _ = _run([*options, "--dry-run"])
    found = re.search(r"expected peak\s+([\d.]+) (GiB|MiB)", printed)
    if found is None:
        raise RuntimeError(f"the plan names no peak:\n{printed}")
    _, taken = _run([*options, *SHORT_RUN])
    return {"foretold": float(found[1]) * {"GiB": 2**30, "MiB": 2**20}[found[2]], "measured": float(taken)}


def _run(options: Sequence[str]) -> tuple[str, int]:
    """What the command prints, and the most memory it held."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", "configs/quickstart.yaml", *options]
        process = subprocess.Popen(
            [*command, f"--trainer.default_root_dir={folder}"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)  # of this process alone, where getrusage knows the largest of all
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text}")
    return text, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
