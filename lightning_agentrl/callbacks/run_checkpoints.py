"""Checkpoints of a run: a trainer that saves them safely, a callback that manages them, and `last` and `best`."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_agentrl.agents.checkpoint import (
    checkpoints_in,
    exists,
    last_good_checkpoint,
    main_file,
    newest_of,
    part_of,
    refuse_unsound_folder,
    remove,
    written_whole,
)
from lightning_agentrl.agents.sharding import in_lockstep
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.errors import ConfigError, Problem
from lightning_agentrl.stalls import waiting_for

LAST = "last.ckpt"
WORDS = ("last", "best", "hpc")
_MONITOR = "trainer.callbacks: [{class_path: RunCheckpoints, init_args: {monitor: val/success}}]"


class CheckpointedTrainer(L.Trainer):
    """Lightning's Trainer with safe checkpoint folders, which sharded strategies handle without Lightning's plugin."""

    reads: str | Path | None = None  # the checkpoint to resume from; Lightning sets ckpt_path only after loading it

    def fit(
        self,
        model: L.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: L.LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        if ckpt_path == "last":
            ckpt_path = _last_of_run(self) or "last"
        refuse_unsound_folder(ckpt_path)
        self.reads = ckpt_path
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)

    def validate(
        self,
        model: L.LightningModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: L.LightningDataModule | None = None,
        weights_only: bool | None = None,
    ) -> Any:
        refuse_unsound_folder(ckpt_path)
        self.reads = ckpt_path
        return super().validate(model, dataloaders, ckpt_path, verbose, datamodule, weights_only)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        if not in_lockstep(self.strategy) or "://" in str(filepath):
            super().save_checkpoint(filepath, weights_only, storage_options)
        else:
            target = Path(self.strategy.broadcast(str(filepath))).absolute()
            writes = written_whole(target, last_good_checkpoint(self)) if self.is_global_zero else None
            with waiting_for(f"the checkpoint {target} to be written"), writes or nullcontext(part_of(target)) as part:
                self.strategy.barrier()
                super().save_checkpoint(part, weights_only, storage_options)
            self.strategy.barrier()
        cast(Any, self.strategy.checkpoint_io).last_good = str(filepath)  # the plugin sets it on the first rank only


def _last_of_run(trainer: L.Trainer) -> Path | None:
    """Return the newest checkpoint of :class:`RunCheckpoints`, including earlier versions of the logger's folder."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, RunCheckpoints):
            folder = Path(callback.dirpath) if callback.dirpath else run_folder(trainer) / "checkpoints"
            versions = folder.parent.parent.glob(f"version_*/{folder.name}")
            folders = {folder, *(versions if folder.parent.name.startswith("version_") else ())}
            # A damaged checkpoint is refused when it is loaded.
            damaged = (link for place in folders if (link := place / LAST).exists())
            return newest_of(folders) or next(damaged, None)
    return None


class RunCheckpoints(ModelCheckpoint):
    """Save checkpoints at the ends of iterations, and keep the last ones and the best.

    Checkpoints are named ``iteration-00012.ckpt``. The last iteration of a run is always saved. The link ``last.ckpt``
    points to the newest complete checkpoint, and ``--ckpt_path last`` follows this link. If the newest checkpoint is
    damaged, both mean the checkpoint before it.

    Args:
        every_n_epochs: number of iterations from one checkpoint to the next.
        keep: number of recent checkpoints to keep; with 1 there is no fallback for a damaged checkpoint.
        monitor: metric whose best value is saved and kept, too, also in iterations without a regular checkpoint. None
            means no best checkpoint.
        mode: whether the best value is the largest (``max``) or the smallest (``min``).
        dirpath: folder to save to; by default ``checkpoints`` in the folder of the run.
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
        self.saved: list[str] = []  # existing checkpoints, newest last
        self.saved_step = 0  # global step of the last checkpoint of an iteration
        self._given = self.dirpath

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Reset the state of an earlier run, whose checkpoints stay unchanged; a checkpoint is loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self.dirpath, self.saved = self._given, []
            self.best_model_score, self.best_model_path, self.last_model_path = None, "", ""
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.saved_step = trainer.global_step  # do not save again when a resumed run ends its last iteration once more

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Skip iterations that were saved already or took no step.
        if cast(Any, trainer).fast_dev_run or trainer.global_step == self.saved_step:
            return
        score = None if self.monitor is None else trainer.callback_metrics.get(self.monitor)
        if score is not None and (torch.isnan(score) or not self._is_best(score)):
            score = None
        done = trainer.current_epoch + 1
        last = trainer.should_stop or done == cast(Any, trainer).datamodule.planned_iterations
        due = last or done % cast(int, self.every_n_epochs) == 0
        if score is not None or due:
            self.save(trainer, score)
            self.saved_step = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self.monitor and self.monitor not in trainer.callback_metrics:
            rank_zero_warn(f"there is no best checkpoint, since the metric '{self.monitor}' was never logged")

    def _is_best(self, score: Tensor) -> bool:
        best = self.best_model_score
        return best is None or bool(score > best if self.mode == "max" else score < best)

    def save(self, trainer: L.Trainer, best_score: Tensor | None = None, name: str = "") -> str:
        """Save a checkpoint, update the link, remove old checkpoints except the best. All ranks must call this method.

        Args:
            trainer: trainer at the end of an iteration, or at any time if a name is given.
            best_score: value of the metric if it is the best so far.
            name: file name without extension; by default the name for the current iteration.

        Returns:
            The path of the checkpoint.
        """
        file = f"{name or f'iteration-{trainer.current_epoch + 1:05d}'}{self.FILE_EXTENSION}"
        path = os.path.join(str(self.dirpath), file)
        if best_score is not None or self.monitor is None:
            self.best_model_path, self.best_model_score = path, best_score
        known = [*(other for other in self.saved if other != path), path]
        kept = {self.best_model_path, *known[-self.keep :]}
        # Set this list before saving, since the checkpoint contains the list.
        self.saved = [other for other in known if other in kept]
        self.last_model_path = path
        trainer.save_checkpoint(path)
        name_last(trainer, path)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.after_save_checkpoint(self)
        continued = Path(str(trainer.ckpt_path)).absolute()  # the checkpoint that the run resumed from is never removed
        for other in map(Path, set(known) - kept):
            if other.parent == Path(str(self.dirpath)) and other.absolute() != continued:
                trainer.strategy.remove_checkpoint(other)
        return path

    @property
    def state_key(self) -> str:
        return type(self).__qualname__  # the key does not depend on the arguments

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"saved": self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue to manage the checkpoints if the folder is the same; those in another folder stay unchanged."""
        if state_dict["dirpath"] == self.dirpath:
            self.saved, self.last_model_path = state_dict["saved"], state_dict["last_model_path"]
        elif not any(all_gather(exists(Path(state_dict["best_model_path"])))):  # one node alone may see the file
            return
        if state_dict["monitor"] == self.monitor:
            self.best_model_path = state_dict["best_model_path"]
            self.best_model_score = state_dict["best_model_score"]


def name_last(trainer: L.Trainer, path: str, folder: Path | None = None) -> None:
    """Point the link ``last.ckpt`` to a checkpoint, replacing it atomically. All ranks must call this function.

    Args:
        trainer: trainer of the run.
        path: path of the checkpoint.
        folder: folder of the link; None: the folder of the checkpoint.
    """
    if trainer.is_global_zero:
        link = (folder or Path(path).parent) / f"{LAST}.part"
        link.parent.mkdir(parents=True, exist_ok=True)  # the folder is missing before the first checkpoint
        remove(link)
        link.symlink_to(os.path.relpath(path, link.parent))
        link.replace(link.with_name(LAST))
    trainer.strategy.barrier()


def named_checkpoint(word: str, trainer: L.Trainer) -> Path | str:
    """Return the checkpoint that a keyword at `ckpt_path` means.

    Args:
        word: ``last``; ``best``; or ``hpc`` for a checkpoint saved at SLURM's signal, which Lightning finds itself.
        trainer: trainer of the run. The trainer's root, the folders of its checkpoint callbacks and the folder of its
            first logger are searched with all subfolders. The trainer's callbacks define the metric for ``best``.

    Raises:
        ConfigError: there is no such checkpoint.
    """
    saving = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # Search only the logger's own folder, since its `save_dir` may be the working folder.
    logging = [Path(logger.save_dir) / str(logger.name) for logger in trainer.loggers[:1] if logger.save_dir]
    roots = [str(root) for root in (trainer.default_root_dir, *(c.dirpath for c in saving), *logging) if root]
    below = "below " + " or ".join(f"'{root}'" for root in dict.fromkeys(map(os.path.relpath, roots)))
    if word == "hpc":
        if any(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")):
            return word
        raise _none(f"there is no hpc_ckpt_*.ckpt in '{os.path.relpath(trainer.default_root_dir)}'")
    if word == "last":
        if last := newest_of(_folders(roots)):
            return last
        raise _none(f"there is no checkpoint {below}")
    watching = [callback for callback in saving if callback.monitor]
    if not watching:
        raise _none("no callback monitors a metric to choose the best", f"add {_MONITOR}, or name a checkpoint")
    monitor, best_of = watching[0].monitor, max if watching[0].mode == "max" else min
    scores = {path: score for folder in _folders(roots) for path, score in _best_in(folder, monitor) if score == score}
    if not scores:
        raise _none(f"there is no best checkpoint by {monitor} {below}")
    return best_of(scores, key=lambda path: scores[path])


def _best_in(folder: Path, monitor: str | None) -> Iterator[tuple[Path, float]]:
    """Yield the best checkpoints and their scores, as recorded in the newest readable checkpoint of a folder."""
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            callbacks = torch.load(main_file(checkpoint), map_location="cpu", weights_only=True, mmap=True)["callbacks"]
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError, KeyError):
            continue
        for state in callbacks.values():
            if isinstance(state, dict) and "best_model_path" in state and state["monitor"] == monitor:
                best, score = folder / Path(state["best_model_path"]).name, state.get("best_model_score")
                if score is not None and best.exists():
                    yield best, float(score)
        return


def _folders(roots: list[str]) -> Iterator[Path]:
    """Yield all folders with checkpoints in or below these folders, each once."""
    seen = set()
    for root in roots:
        for folder, inner, files in os.walk(root):
            whole = [name for name in inner if name.endswith(".ckpt")]  # a checkpoint may be a folder
            inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in whole)
            place = Path(folder).resolve()
            if place not in seen and (whole or any(name.endswith(".ckpt") for name in files)):
                seen.add(place)
                yield Path(folder)


def _none(what: str, fix: str = "name a checkpoint, or remove ckpt_path to start a new run") -> ConfigError:
    return ConfigError(Problem(what, key="ckpt_path", fix=fix))
