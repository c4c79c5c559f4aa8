"""Ablations with the demo model: `base.yaml`, and six runs that differ from it in one choice, with three seeds each.

    make ablations                                    # all of them, over an hour on two cores
    python benchmarks/ablations/run.py --only no_kl   # one arm, and the base run

Prints the table of `docs/results/ablations.md`. A run whose folder holds a summary is not made again, so this can be
stopped at any time; remove `runs/ablations` when a setting has changed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.intervals import Interval, Record, share, success_difference, welch
from benchmarks.quickstart_seeds import read_run

ROOT = Path(__file__).resolve().parents[2]

BASE_CONFIG = Path(__file__).with_name("base.yaml")
SEEDS = (0, 1, 2)
REWARD = "rollout/reward_per_turn"
# Dotted keys of each arm. What they stand for, and what was expected of them, is on the page.
ARMS: dict[str, dict[str, Any]] = {
    "base": {},
    "single_discount": {
        "model.init_args.advantage.init_args.gamma_token": 0.95,
        "model.init_args.advantage.init_args.lam_token": 0.95,
    },
    "no_warmup": {"trainer.callbacks": [{"class_path": "RunSummary"}]},
    # At 0 there would be no reference, and so no drift to report; 1e-9 is below the rounding of a reward.
    "no_kl": {"model.init_args.kl.reward": 1e-9},
    "first_token_1": {"model.init_args.first_token_weight": 1.0},
    # All of a second model learns at lr_critic, which would be much for a trunk at the rate of the head alone.
    "separate_critic": {
        "model.init_args.critic": {"class_path": "SeparateCritic"},
        "model.init_args.optim.lr_critic": 1e-4,
    },
    "fewer_envs": {"data.init_args.num_envs": 8, "data.init_args.turns_per_env": 16},
}


def arguments_of(arm: str) -> list[str]:
    """Return the options of the command line, which reads values as YAML."""
    return [f"--{key}={json.dumps(value)}" for key, value in ARMS[arm].items()]


def run(arm: str, seed: int, folder: Path) -> None:
    """Make a run as a process of its own with one thread, which is what makes two at once worthwhile."""
    if (folder / "summary.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lightning_agentrl", "fit", "--config", str(BASE_CONFIG), *arguments_of(arm)]
    command += [f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with (folder / "log.txt").open("w") as log:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    print(f"{arm} seed {seed}: {'done' if not code else f'failed, see {log.name}'}", flush=True)


def record_of(folder: Path) -> Record:
    """Return what a finished run wrote: held-out success before and after, and its curve of reward per turn."""
    found = read_run(folder, (REWARD,))
    return found.summary | {"curve": found.curves[REWARD]}


def area(record: Record) -> float:
    """Return the mean height of the curve of reward per turn, by trapezoids over the iterations."""
    points = record["curve"]
    width = points[-1][0] - points[0][0]
    if not width:
        return float(points[0][1])
    return float(sum((x2 - x1) * (y1 + y2) / 2 for (x1, y1), (x2, y2) in pairwise(points)) / width)


def table(records: Mapping[str, Mapping[int, Record]]) -> str:
    """Return each arm against the base run, over the seeds that both have."""
    lines = [
        "| arm | seeds | base: held-out success before → after | arm: the same | difference after, in points (95 % "
        "interval) | area under reward per turn, base | arm | difference (95 % interval) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, of_arm in records.items():
        seeds = sorted(records["base"].keys() & of_arm.keys())
        if name == "base" or not seeds:
            continue
        base, arm = ([of[seed] for seed in seeds] for of in (records["base"], of_arm))
        cells = [f"`{name}`", str(len(seeds))]
        cells += [f"{share(of, 'before'):.3f} → {share(of, 'after'):.3f}" for of in (base, arm)]
        cells.append(_told(success_difference(arm, base), 100, ".1f"))
        areas = [[area(record) for record in of] for of in (base, arm)]
        cells += [f"{statistics.mean(of):.4f}" for of in areas]
        cells.append(_told(welch(areas[1], areas[0]), 1, ".4f"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(interval: Interval | None, unit: float, form: str) -> str:
    if interval is None:
        return "needs two seeds"
    difference, low, high = (format(unit * x, f"+{form}") for x in interval)
    return f"{difference} ({low} to {high})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "ablations", help="folder of logs and events")
    chosen = parser.parse_args(arguments)
    folders = {
        (arm, seed): chosen.runs.resolve() / f"{arm}-seed{seed}"
        for seed in chosen.seeds
        for arm in dict.fromkeys(("base", *chosen.only))
    }
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(lambda job: run(*job, folders[job]), folders))
    records: dict[str, dict[int, Record]] = {arm: {} for arm in ARMS}
    for (arm, seed), folder in folders.items():
        if (folder / "summary.json").exists():
            records[arm][seed] = record_of(folder)
    print(table(records))


if __name__ == "__main__":
    main()
