"""Summary of a run in one file: held-out success before and after training."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.checkpoint import in_order
from lightning_agentrl.agents.hooks import play_held_out
from lightning_agentrl.callbacks.run_checkpoints import RunCheckpoints
from lightning_agentrl.callbacks.run_folder import run_folder, whole_file
from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.metrics.episodes import EpisodeMetrics, reported_means
from lightning_agentrl.rollout import RolloutDataModule

KEYS = ("success", "success_low", "success_high", "return", "episodes", "mean_turns", "valid_action_ratio")
LOST = "lost_episodes"  # entry for lost episodes, present only if there are any
NAME = "summary.json"


class RunSummary(L.Callback):
    """Play held-out episodes before and after training; print a summary and write it to ``summary.json``.

    The file is in the folder of the run. A copy in ``default_root_dir`` is from the run that ended last; the copy's
    entry ``version`` names that run. A resumed run keeps the results from before its first start and adds up the
    minutes of all starts. The checkpoint in the summary has the weights that played the last episodes.
    """

    def __init__(self) -> None:
        self.before: dict[str, Any] | None = None
        self._started = time.monotonic()
        self._earlier_minutes = 0.0
        self._saved_at = -1  # global step of the newest checkpoint

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reset the state of an earlier run; a checkpoint is loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self.before, self._earlier_minutes, self._saved_at = None, 0.0, -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()
        self._set_aside(run_folder(trainer) / NAME)
        if self.before is None:
            self.before = self._play(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._saved_at = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        after, folder = self._play(trainer, pl_module), run_folder(trainer)
        copy = Path(trainer.default_root_dir) / NAME
        self._write(
            folder / NAME,
            copy,
            {
                "run_id": cast(Agent, pl_module).run_id,
                "version": os.path.relpath(folder, copy.parent),
                "seed": int(os.environ.get("PL_GLOBAL_SEED", 0)),
                "before": self.before,
                "after": after,
                "minutes": round(self._minutes, 2),
                "checkpoint": self._final_checkpoint(trainer),
            },
        )

    @property
    def _minutes(self) -> float:
        return self._earlier_minutes + (time.monotonic() - self._started) / 60

    def _final_checkpoint(self, trainer: L.Trainer) -> str:
        callback = trainer.checkpoint_callback
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None or cast(Any, trainer).fast_dev_run:
            return ""
        named = {callback.last_model_path, callback.best_model_path, *callback.best_k_models}
        found = str(next(reversed(in_order(path for path in map(Path, named - {""}) if path.exists())), ""))
        path = trainer.strategy.broadcast(found)  # other nodes may not see the files, but all ranks must act alike
        if self._saved_at != trainer.global_step or not path:
            if isinstance(callback, RunCheckpoints):
                path = callback.save(trainer, name="final")  # this call also updates last.ckpt
            else:
                path = str(Path(callback.dirpath) / "final.ckpt")
                trainer.save_checkpoint(path, weights_only=False)
        return os.path.relpath(path)

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "minutes": self._minutes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before, self._earlier_minutes = state_dict["before"], state_dict["minutes"]

    def _play(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        data = cast(RolloutDataModule, cast(Any, trainer).datamodule)
        metrics = EpisodeMetrics(data.pool.names).to(pl_module.device)
        results = play_held_out(pl_module, data.val_dataloader().seeds)
        metrics.update(results)
        numbers = metrics.compute()
        own = {name: _results(numbers, f"source/{name}/") for name in data.pool.names}
        by_name = over_ranks(reported_means(results))
        env = {name: round(value, 4) for name, value in by_name.items()}
        return _results(numbers) | ({"sources": own} if len(own) > 1 else {}) | ({"env": env} if env else {})

    @rank_zero_only
    def _set_aside(self, path: Path) -> None:
        """Rename the summary that an earlier run left in the same folder; without a logger, runs share a folder."""
        if path.exists():
            path.replace(path.with_name(f"earlier_{path.name}"))

    @rank_zero_only
    def _write(self, path: Path, copy: Path, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=2)
        for place in dict.fromkeys((path.resolve(), copy.resolve())):
            with whole_file(place) as beside:
                beside.write_text(text + "\n")
        print(f"{text}\nwritten to {copy}", flush=True)


def _results(numbers: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return the entries of the summary from the metrics with a prefix."""
    result = {key: round(numbers[prefix + key], 4) for key in KEYS if prefix + key in numbers}
    result |= {key: int(result[key]) for key in ("episodes",) if key in result}
    return result | ({LOST: int(numbers[prefix + LOST])} if numbers.get(prefix + LOST) else {})
