"""How alike the iterations of a run are: what each collection took, in turns and in seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean, median
from typing import Any, cast

import lightning as L

from benchmarks.laboratory.measures import Run
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.types import Rollout

KEYS = ("iteration_turns", "turns_in_sequence", "collect_seconds")  # of a record; earlier ones have none of them


class Steadiness(RolloutCallback):
    """Notes what was collected for each iteration in which the actor moved, by the keys of a record."""

    def __init__(self) -> None:
        self.noted: dict[str, list[float]] = {key: [] for key in KEYS}
        self._seconds = 0.0  # of the newest collection

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        stream = cast(Any, trainer).datamodule.stream
        collect = stream.collect

        def timed() -> Rollout:
            started = time.perf_counter()
            rollout = collect()
            self._seconds = time.perf_counter() - started
            return cast(Rollout, rollout)

        stream.collect = timed

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        if agent.phase == "train":
            by_env = Counter(turn.env for turn in rollout.turns)
            found = (by_env.total(), max(by_env.values()), round(self._seconds, 4))
            for key, number in zip(KEYS, found, strict=True):
                self.noted[key].append(number)


def is_noted(run: Run) -> bool:
    """Return whether a record tells how steady its run was."""
    return all(key in run for key in KEYS)


def row(runs: Sequence[Run], envs: int) -> list[str]:
    """Return the numbers of an arm, over all iterations of its runs.

    Args:
        runs: of the arm.
        envs: that play at a time, each of them one episode where episodes are whole.
    """
    turns, in_sequence = (list(chain.from_iterable(run[key] for run in runs)) for key in KEYS[:2])
    waits = [most * envs / count for count, most in zip(turns, in_sequence, strict=True)]
    slowest = median(max(run["collect_seconds"]) / median(run["collect_seconds"]) for run in runs)
    return [
        f"{fmean(turns):,.0f} ({min(turns):,} to {max(turns):,})",
        f"{fmean(in_sequence):.0f}, at most {max(in_sequence)}",
        f"{fmean(waits):.1f}",
        f"{slowest:.1f}",
    ]
