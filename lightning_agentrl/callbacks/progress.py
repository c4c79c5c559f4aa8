"""Progress that names the stage: one rewritten line in a terminal, one line per iteration elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl.agents import Agent

SHOWN = {
    "rollout/success": "success",
    "rollout/reward_per_turn": "reward/turn",
    "rollout/valid_action_ratio": "valid",
    "kl/reference": "kl",
    "critic/explained_variance": "explained",
    "val/success": "held-out success",
}


class StageProgress(ProgressBar):
    """Iteration, phase and stage, the main numbers of the last iteration, and the time left."""

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._started: float | None = None
        self._first_epoch = 0
        self._listening: Any = None

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        agent = cast(Agent, pl_module)
        if self._listening is not agent.clock:  # fit and validate of one agent share its clock
            agent.clock.listeners.append(lambda name: self._show_stage(trainer, agent, name))
            self._listening = agent.clock

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._started = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._started is None:  # not before, since other callbacks may play episodes first
            self._started, self._first_epoch = time.monotonic(), trainer.current_epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        agent = cast(Agent, pl_module)
        done = trainer.current_epoch + 1 - self._first_epoch
        seconds = time.monotonic() - (self._started or time.monotonic())
        text = f"{self._head(trainer, agent)} | {self._numbers(trainer)}"
        if trainer.max_epochs and trainer.max_epochs > 0:
            left = seconds / done * (trainer.max_epochs - trainer.current_epoch - 1)
            text += f" | {_minutes(seconds)} gone, {_minutes(left)} left"
        self._print(text)

    def _show_stage(self, trainer: L.Trainer, agent: Agent, stage: str) -> None:
        if sys.stdout.isatty() and self._enabled:
            self._rewrite(f"{self._head(trainer, agent)} | {stage} ...")

    def _head(self, trainer: L.Trainer, agent: Agent) -> str:
        of = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        return f"iteration {trainer.current_epoch + 1}{of} {agent.phase}"

    def _numbers(self, trainer: L.Trainer) -> str:
        metrics = trainer.callback_metrics
        return " ".join(f"{short} {float(metrics[name]):.3f}" for name, short in SHOWN.items() if name in metrics)

    @rank_zero_only
    def _print(self, text: str) -> None:
        if self._enabled:
            if sys.stdout.isatty():
                self._rewrite(text)
                print(flush=True)
            else:
                print(text, flush=True)

    @rank_zero_only
    def _rewrite(self, text: str) -> None:
        print(f"\r\x1b[2K{text}", end="", flush=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
