"""A run in one file: held-out success before and after."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl.metrics.episodes import EpisodeMetrics
from lightning_agentrl.rollout import RolloutDataModule

KEYS = ("success", "success_low", "success_high", "episodes", "mean_turns", "valid_action_ratio")


class RunSummary(L.Callback):
    """Plays the held-out episodes before and after training; writes and prints ``summary.json``.

    A resumed run keeps the numbers from before its first start.

    Args:
        path: the file to write; ``summary.json`` in the trainer's ``default_root_dir`` when not given.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self.before: dict[str, float] | None = None
        self._started = time.monotonic()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()
        if self.before is None:
            self.before = self._play(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        after = self._play(trainer, pl_module)
        checkpoint = getattr(trainer.checkpoint_callback, "last_model_path", "") or getattr(
            trainer.checkpoint_callback, "best_model_path", ""
        )
        path = Path(self.path) if self.path else Path(trainer.default_root_dir) / "summary.json"
        self._write(
            path,
            {
                "seed": int(os.environ.get("PL_GLOBAL_SEED", 0)),
                "before": self.before,
                "after": after,
                "minutes": round((time.monotonic() - self._started) / 60, 2),
                "checkpoint": os.path.relpath(checkpoint) if checkpoint else "",
            },
        )

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["before"]

    def _play(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        data = cast(RolloutDataModule, cast(Any, trainer).datamodule)
        metrics = EpisodeMetrics().to(pl_module.device)
        metrics.update(data.play_held_out(data.validation_seeds()))
        numbers = metrics.compute()
        return {
            key: int(numbers[key]) if key == "episodes" else round(numbers[key], 4) for key in KEYS if key in numbers
        }

    @rank_zero_only
    def _write(self, path: Path, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        print(f"{text}\nwritten to {path}", flush=True)
