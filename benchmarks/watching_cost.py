"""What watching a run costs: seconds spent on telling what happens, and on checks, per second of an iteration.

    .venv/bin/python benchmarks/watching_cost.py [--config configs/quickstart.yaml] [--epochs 5]

Runs a few iterations of a config without held-out episodes and measures, in that one run, the time inside metrics, turn
log, report, progress, logger and chain, inside the proof of the engine at updates and the checks of gradients, and the
parts of saving a checkpoint at the end of each iteration. The first iteration after the warm-up and those that follow
count.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

import lightning_agentrl.agents.agent as agent_module
from lightning_agentrl.agents import checkpoint_files, checkpoint_io
from lightning_agentrl.agents.engine_watch import EngineWatch
from lightning_agentrl.agents.finite import FiniteSteps
from lightning_agentrl.callbacks import Chain, CriticWarmup, RolloutReport, StageProgress, TurnLog
from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.models.allocator import keep_freed_memory

SECONDS: defaultdict[str, float] = defaultdict(float)


def timed(owner: Any, name: str, label: str) -> None:
    """Add up the seconds inside a method, or a function of a module, under a label."""
    method: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            SECONDS[label] += time.perf_counter() - started

    setattr(owner, name, wrapper)


class Read(L.Callback):
    """The seconds of each iteration and of what was measured in it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch:
            self.on_train_end(trainer, pl_module)  # not at the end of the epoch: the logger comes after it
        SECONDS.clear()
        self.started = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.rows.append({**SECONDS, "iteration": time.perf_counter() - self.started})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--epochs", type=int, default=5)
    wanted = parser.parse_args()
    keep_freed_memory()
    timed(TurnLog, "on_rollout", "turn log")
    timed(RolloutReport, "on_rollout", "report")
    timed(StageProgress, "_show_stage", "progress")
    timed(TensorBoardLogger, "log_metrics", "logger")
    timed(TensorBoardLogger, "save", "logger")
    timed(Chain, "on_rollout", "chain")
    timed(Chain, "on_train_epoch_end", "chain")
    timed(agent_module, "describe", "metrics")
    timed(agent_module, "gradients_are_finite", "check: gradients are finite")
    timed(FiniteSteps, "judge", "check: guards")
    timed(EngineWatch, "of_rollout", "check: proof of the engine")
    timed(EngineWatch, "after_update", "check: proof of the engine")
    timed(checkpoint_io.StraightToDisk, "save_checkpoint", "checkpoint: write")
    timed(checkpoint_files, "seal", "checkpoint: compare with memory, seal")
    timed(checkpoint_files, "sync", "checkpoint: sync")
    timed(checkpoint_files, "damage", "checkpoint: read back")
    reader = Read()

    class Measured(AgentCLI):
        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "RunSummary"] + [reader]  # type: ignore[attr-defined]
            return trainer

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [
            "agentrl",
            *("fit", "--config", wanted.config, f"--trainer.max_epochs={wanted.epochs}"),
            f"--trainer.default_root_dir={folder}",
        ]
        callbacks = [
            {"class_path": "TurnLog"},
            {"class_path": "RunCheckpoints", "init_args": {"keep": 1}},
            {"class_path": CriticWarmup.__name__, "init_args": {"rollouts": 1, "rounds": 1, "fraction": 1.0}},
        ]
        sys.argv.append(f"--trainer.callbacks={callbacks}")
        Measured()
    rows = reader.rows[1:]  # the first one is the warm-up
    labels = sorted({label for row in rows for label in row} - {"iteration"})
    iteration = statistics.median(row["iteration"] for row in rows)
    print(f"\n| part | seconds of an iteration of {iteration:.1f} s | share |\n|---|---|---|")
    for label in labels:
        seconds = statistics.median(row.get(label, 0.0) for row in rows)
        print(f"| {label} | {seconds:.3f} | {seconds / iteration:.2%} |")
    for what, kinds in {"all but checkpoints": "", "checks": "check: ", "checkpoint": "checkpoint: "}.items():
        chosen = [x for x in labels if (x.startswith(kinds) if kinds else not x.startswith("checkpoint: "))]
        total = statistics.median(sum(row.get(x, 0.0) for x in chosen) / row["iteration"] for row in rows)
        print(f"| {what} | | {total:.2%} |")
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
