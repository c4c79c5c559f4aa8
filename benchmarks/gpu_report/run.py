"""Everything that is to be known of this package on the GPUs of this machine: one command, one page.

    make gpu-report                                            # all parts; goes on where it stopped
    make gpu-report GPU_REPORT_ARGS="--only tests fit-0.5B"    # some parts, by name
    make gpu-report GPU_REPORT_ARGS="--random-models"          # where no model hub can be reached

Each part has a time limit, a log and a file with its outcome in `runs/gpu_report/gpu`; what has figures of this machine
is not measured again, what failed or took too long is. Writes `docs/results/gpu.md`. Without a GPU every part is tried
with a tiny model on the CPU, and the page is `runs/gpu_report/cpu/page.md`. Ends with 1 only if no part has figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.engines.quickstart import commit
from filelock import FileLock, Timeout

from benchmarks.gpu_report.page import named, page
from benchmarks.gpu_report.parts import ROOT, Machine, parts_for
from benchmarks.gpu_report.runner import outcome_of, run_parts
from lightning_agentrl.agents.resume import versions

PAGE = ROOT / "docs" / "results" / "gpu.md"
# In a process of its own: this one must not take a share of a GPU for the time of the report.
LOOK = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
print(json.dumps([[gpu.name, gpu.total_memory] for gpu in gpus]))
"""


def look(random_models: bool) -> Machine:
    """Ask torch for the GPUs of this machine."""
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    gpus = json.loads(done.stdout)
    return Machine(tuple(name for name, _ in gpus), min((memory for _, memory in gpus), default=0), random_models)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PART", help="names of the parts to run")
    parser.add_argument("--random-models", action="store_true", help="of real sizes, instead of those of the hub")
    parser.add_argument("--anew", action="store_true", help="forget what was measured before")
    parser.add_argument("--list", action="store_true", help="the names of all parts, and run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu_report")
    wanted = parser.parse_args(arguments)
    machine = look(wanted.random_models)
    folder = wanted.folder.resolve() / ("gpu" if machine.gpus else "cpu")
    parts = parts_for(machine, folder)
    every = [part for _, of_heading in parts for part in of_heading]
    if wanted.list:
        print("\n".join(f"{part.name}: {part.title}, {part.minutes:g} min at most" for part in every))
        return
    if unknown := sorted(set(wanted.only or ()) - {part.name for part in every}):
        parser.error(f"--only: no part is named {', '.join(unknown)}; parts are {', '.join(p.name for p in every)}")
    chosen = [part for part in every if not wanted.only or part.name in wanted.only]
    if wanted.anew:
        for part in chosen:
            shutil.rmtree(folder / part.name, ignore_errors=True)
    file = PAGE if machine.gpus else folder / "page.md"
    named_machine = f"{named(machine.gpus) or 'no GPU'}, {platform.node()}"

    def write() -> None:
        outcomes = {part.name: outcome for part in every if (outcome := outcome_of(part, folder)) is not None}
        packages = versions() | {"cores": str(os.cpu_count())}
        file.write_text(page(machine, packages, parts, outcomes))

    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(ROOT)
    try:
        with FileLock(folder / ".lock", timeout=0):
            outcomes = run_parts(chosen, folder, named_machine, commit(), write)
            write()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on where it stopped") from None
    except Timeout:
        raise SystemExit(f"another report is being made in {folder}; wait for it, or give another --folder") from None
    print(f"the page is {file}")
    if not any(outcome.ended == "done" for outcome in outcomes.values()):
        raise SystemExit("no part has any figures")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends us ends the part as well
    main()
