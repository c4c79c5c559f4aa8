"""Every estimator on small tasks with three seeds: does it learn, and how noisy are the gradients of some.

    make table

Writes `docs/results/estimators.md` and its records, `estimators.json`; what is there already is kept, so this can be
stopped and goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.estimators import variance
from benchmarks.estimators.learn import BANDIT, TWO_ROOMS, Task, estimators, learn
from benchmarks.estimators.report import IN_ROOMS, SEEDS, cells, key, write

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "docs" / "results" / "estimators.json"


def run(task: Task, name: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        outcome = asdict(learn(task, estimators()[name], Path(folder), seed))
    return outcome | {"curve": [round(x, 3) for x in outcome["curve"]], "seconds": round(outcome["seconds"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "estimators", help="folder for what is between")
    parser.add_argument("--page", action="store_true", help="write the page from the records and run nothing")
    wanted = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)  # models this small are slower with more
    records: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}}
    for task, names in ((BANDIT, tuple(estimators())), (TWO_ROOMS, IN_ROOMS)):
        for name in () if wanted.page else names:
            runs = records["runs"].setdefault(key(name, task), {})
            for seed in SEEDS:
                if str(seed) not in runs:
                    runs[str(seed)] = run(task, name, seed)
                    print(f"{name}, {task.name}, seed {seed}: {cells({str(seed): runs[str(seed)]})} s", flush=True)
                    write(records, RESULTS)
    if not wanted.page and "noise" not in records:
        records["noise"] = variance.run(wanted.runs)
    write(records, RESULTS)


if __name__ == "__main__":
    main()
