"""Three iterations of a config with vLLM and real updates of its weights: stages, log-prob gap, memory of the GPU.

    python -m benchmarks.engines.three_iterations configs/babyai_goto_qwen2.5-0.5b.yaml --trainer.precision ...

Options after the config go to `agentrl fit`. The last line is JSON; figures are of the last iteration.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.engines.busy import BusyGPU

SHORT = (
    *("--trainer.max_epochs=3", "--trainer.callbacks=[]", "--data.init_args.validation.episodes=0"),
    *("--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"),
)


def figures(folder: Path, log: str, gpu: BusyGPU) -> dict[str, Any]:
    """Read what a run wrote and printed."""
    (events,) = folder.rglob("events.out.tfevents.*")
    scalars = EventAccumulator(str(events)).Reload()
    last = {name: scalars.Scalars(f"time/{name}_seconds")[-1] for name in ("iteration", "collect", "score", "update")}
    found = {name: event.value for name, event in last.items()}
    end = last["iteration"].wall_time
    start = end - found["iteration"]
    parts = {"iteration": (start, end), "collect": (start, start + found["collect"])}
    usages = {name: gpu.between(*part) for name, part in (parts | {"update": (end - found["update"], end)}).items()}
    compared = re.search(r"samples from the policy: (.*)", log)
    return {
        "seconds": found | {"sync": scalars.Scalars("time/sync_seconds")[-1].value},
        "iteration over its stages": found["iteration"] / sum(found[name] for name in ("collect", "score", "update")),
        "mean log-prob gap": scalars.Scalars("mismatch/logp_gap_mean")[-1].value,
        "comparison of the engine": compared and compared[1],
        "share of time in which the GPU computes": {name: usage and usage.share for name, usage in usages.items()},
        "GiB of the GPU at most": {name: usage and usage.gib for name, usage in usages.items()},
    }


def main() -> None:
    config, *options = sys.argv[1:]
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", config, *SHORT, *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with tempfile.TemporaryDirectory() as folder, BusyGPU() as gpu:
        run = subprocess.run([*command, f"--trainer.default_root_dir={folder}"], **pipes)
        print(run.stdout, flush=True)
        if run.returncode:
            raise SystemExit(run.returncode)
        print(json.dumps(figures(Path(folder), run.stdout, gpu)))


if __name__ == "__main__":
    main()
