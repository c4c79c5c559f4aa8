"""What logging costs: seconds spent on metrics, turn log, report, progress and the logger, per second of an iteration.

    .venv/bin/python benchmarks/logging_cost.py [--config configs/quickstart.yaml] [--epochs 5]

Runs a few iterations of a config without held-out episodes and measures, in that one run, the time inside every part
that only tells what happens. The first iteration after the warm-up and those that follow count.
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

from lightning_agentrl.callbacks import CriticWarmup, RolloutReport, StageProgress, TurnLog
from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.models.allocator import keep_freed_memory

SECONDS: defaultdict[str, float] = defaultdict(float)


def timed(owner: type, name: str, label: str) -> None:
    """Add up the seconds inside a method under a label."""
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
    import lightning_agentrl.agents.agent as agent_module

    describe = agent_module.describe

    def timed_describe(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = describe(*args, **kwargs)
        SECONDS["metrics"] += time.perf_counter() - started
        return result

    agent_module.describe = timed_describe
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
            *(f"--trainer.default_root_dir={folder}", "--trainer.enable_checkpointing=false"),
        ]
        callbacks = [
            {"class_path": "TurnLog"},
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
    total = statistics.median(sum(row.get(label, 0.0) for label in labels) / row["iteration"] for row in rows)
    print(f"| all | | {total:.2%} |")
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
