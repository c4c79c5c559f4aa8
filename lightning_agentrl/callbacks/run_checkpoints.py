"""The checkpoints of a run: the last ones, the best one, and a link to the newest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.checkpoint_files import exists, newest_of, remove
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.distributed import all_gather

LAST = "last.ckpt"


class RunCheckpoints(ModelCheckpoint):
    """Checkpoints at the ends of iterations: the last ones and the best.

    They are named ``iteration-00012.ckpt``. The link ``last.ckpt`` names the newest and is switched once that one is
    whole; ``--ckpt_path last`` follows it. If the newest is damaged, both mean the one before it.

    Args:
        every_n_epochs: iterations from one to the next.
        keep: how many of the last are kept; with 1 there is none to fall back to.
        monitor: a metric; the checkpoint with its best value is kept too. It is also saved when it is not due. None:
            none is the best.
        mode: whether the best value is the largest or the smallest.
        dirpath: where to save; ``checkpoints`` in the folder of the run when not given.
    """

    def __init__(
        self,
        every_n_epochs: int = 1,
        keep: int = 2,
        monitor: str | None = None,
        mode: Literal["max", "min"] = "max",
        dirpath: str | None = None,
    ) -> None:
        if keep < 1 or every_n_epochs < 1:
            raise ValueError(
                f"RunCheckpoints needs keep and every_n_epochs of at least 1, got {keep}, {every_n_epochs}"
            )
        super().__init__(
            dirpath, monitor=monitor, mode=mode, every_n_epochs=every_n_epochs, save_on_train_epoch_end=True
        )
        self.keep = keep
        self.saved: list[str] = []  # that are still there, the newest last
        self._given = self.dirpath

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the checkpoints of an earlier run where and as they are; a checkpoint is loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self.dirpath, self.saved = self._given, []
            self.best_model_score = None
            self.best_model_path = self.last_model_path = self._last_checkpoint_saved = ""
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step  # a resumed run ends its last iteration once more

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._should_skip_saving_checkpoint(trainer):
            return
        score = self._score(cast(Agent, pl_module))
        best = score is not None and (
            self.best_model_score is None
            or bool(score > self.best_model_score if self.mode == "max" else score < self.best_model_score)
        )
        if best or (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self.save(trainer, score if best else None)

    def save(self, trainer: L.Trainer, best_score: Tensor | None = None, name: str = "") -> str:
        """Save now, link, and remove what is neither among the last nor the best. All ranks must call it.

        Args:
            trainer: at the end of an iteration, unless a name is given.
            best_score: value of the metric, if it is the best so far.
            name: of the file, without its extension; by default that of the iteration that ends.

        Returns:
            The path of the checkpoint.
        """
        own, at_step = name or f"iteration-{trainer.current_epoch + 1:05d}", self._last_global_step_saved
        path = os.path.join(str(self.dirpath), f"{own}{self.FILE_EXTENSION}")
        if best_score is not None or self.monitor is None:
            self.best_model_path, self.best_model_score = path, best_score
        known = [*(other for other in self.saved if other != path), path]
        kept = {self.best_model_path, *known[-self.keep :]}
        # Set before saving, since it is part of what is saved.
        self.saved = [other for other in known if other in kept]
        self.last_model_path = path
        self._save_checkpoint(trainer, path)
        if name:
            self._last_global_step_saved = at_step  # the checkpoint of the iteration is still to come
        self.name_last(trainer, path)
        for other in known:
            if other not in kept and self._should_remove_checkpoint(trainer, other, path):
                self._remove_checkpoint(trainer, other)
        return path

    def name_last(self, trainer: L.Trainer, path: str) -> None:
        """Let ``last.ckpt`` name this checkpoint, which may also be one that was not saved here."""
        self._link_checkpoint(trainer, path, os.path.join(str(self.dirpath), LAST))

    def _score(self, agent: Agent) -> Tensor | None:
        """Return the metric of the current weights; None where they have none, as between two validations."""
        score = None if self.monitor is None else agent.monitored(self.monitor, type(self).__name__)
        return None if score is None or torch.isnan(score) else score

    @staticmethod
    def _link_checkpoint(trainer: L.Trainer, filepath: str, linkpath: str) -> None:
        """Switch the link at once, so that there always is one."""
        if trainer.is_global_zero:
            link = Path(f"{linkpath}.part")
            remove(link)
            link.symlink_to(os.path.relpath(filepath, link.parent))
            link.replace(linkpath)
        trainer.strategy.barrier()

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        """Return the newest of this run and of those beside it, since a logger begins a new version at each start."""
        folder = Path(self.dirpath) if self.dirpath else run_folder(trainer) / "checkpoints"
        versions = folder.parent.parent.glob(f"version_*/{folder.name}")
        folders = {folder, *(versions if folder.parent.name.startswith("version_") else ())}
        damaged = (link for link in (place / LAST for place in folders) if link.exists())
        last = newest_of(folders) or next(damaged, None)  # which is refused, rather than that a run begins anew
        return set() if last is None else {str(last)}

    @property
    def state_key(self) -> str:
        return type(self).__qualname__  # whatever its arguments are

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"saved": self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the checkpoints of the same folder; those of another one stay as they are."""
        if state_dict["dirpath"] == self.dirpath:
            self.saved, self.last_model_path = state_dict["saved"], state_dict["last_model_path"]
        elif not any(all_gather(exists(Path(state_dict["best_model_path"])))):  # other nodes may not see it
            return
        if state_dict["monitor"] == self.monitor:
            self.best_model_path = state_dict["best_model_path"]
            self.best_model_score = state_dict["best_model_score"]
