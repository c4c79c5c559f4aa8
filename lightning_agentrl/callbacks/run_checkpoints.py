"""The checkpoints of a run: the last ones, the best one, a link to the newest, and what `last` and `best` mean."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_agentrl.agents.checkpoint import (
    checkpoints_in,
    exists,
    main_file,
    newest_of,
    refuse_unsound_folder,
    remove,
)
from lightning_agentrl.callbacks.run_folder import run_folder
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.errors import ConfigError, Problem

LAST = "last.ckpt"
WORDS = ("last", "best", "hpc")
_MONITOR = "trainer.callbacks: [{class_path: RunCheckpoints, init_args: {monitor: val/success}}]"


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
        score = None if self.monitor is None else trainer.callback_metrics.get(self.monitor)
        if score is not None and (torch.isnan(score) or not self._is_best(score)):
            score = None
        if score is not None or trainer.should_stop or (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self.save(trainer, score)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self.monitor and self.monitor not in trainer.callback_metrics:
            rank_zero_warn(f"no checkpoint is the best, since no metric '{self.monitor}' was logged")

    def _is_best(self, score: Tensor) -> bool:
        best = self.best_model_score
        return best is None or bool(score > best if self.mode == "max" else score < best)

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
        """Let ``last.ckpt`` name this checkpoint, which may also be one that was not saved here.

        The link is replaced at once, so that there always is one.
        """
        if trainer.is_global_zero:
            link = Path(str(self.dirpath), f"{LAST}.part")
            remove(link)
            link.symlink_to(os.path.relpath(path, link.parent))
            link.replace(link.with_name(LAST))
        trainer.strategy.barrier()

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        """Return the newest of this run and of those beside it, since a logger begins a new version at each start."""
        folder = Path(self.dirpath) if self.dirpath else run_folder(trainer) / "checkpoints"
        versions = folder.parent.parent.glob(f"version_*/{folder.name}")
        folders = {folder, *(versions if folder.parent.name.startswith("version_") else ())}
        damaged = (link for link in (place / LAST for place in folders) if link.exists())
        last = newest_of(folders) or next(damaged, None)  # which is refused, rather than that a run begins anew
        refuse_unsound_folder(last)
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


def named_checkpoint(word: str, trainer: L.Trainer) -> Path | str:
    """Return the checkpoint that a word at `ckpt_path` stands for.

    Args:
        word: ``last``, ``best``, or ``hpc`` for one that SLURM's signal left, which Lightning finds by itself.
        trainer: its root and the folders in which its callbacks save and its first logger has its runs are searched,
            with all that is below them; its callbacks say what the best is.

    Raises:
        ConfigError: there is none.
    """
    saving = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    # Where Lightning logs. Beside it there may be anything: `save_dir` of some loggers is the working folder.
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
        raise _none("no metric says which checkpoint is the best", f"add {_MONITOR}, or name a checkpoint")
    monitor, best_of = watching[0].monitor, max if watching[0].mode == "max" else min
    scores = {path: score for folder in _folders(roots) for path, score in _best_in(folder, monitor) if score == score}
    if not scores:
        raise _none(f"no checkpoint {below} was the best by {monitor}")
    return best_of(scores, key=lambda path: scores[path])


def _best_in(folder: Path, monitor: str | None) -> Iterator[tuple[Path, float]]:
    """Yield the best checkpoints and their scores, as the newest readable checkpoint of a folder names them."""
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
    """Yield all folders with checkpoints below these, each once."""
    seen = set()
    for root in roots:
        for folder, inner, files in os.walk(root):
            whole = [name for name in inner if name.endswith(".ckpt")]  # a checkpoint may be a folder
            inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in whole)
            place = Path(folder).resolve()
            if place not in seen and (whole or any(name.endswith(".ckpt") for name in files)):
                seen.add(place)
                yield Path(folder)


def _none(what: str, fix: str = "name a checkpoint, or leave ckpt_path out to start anew") -> ConfigError:
    return ConfigError(Problem(what, key="ckpt_path", fix=fix))
