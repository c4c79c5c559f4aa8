"""What `ckpt_path: last` and `ckpt_path: best` stand for: checkpoints that are on the disk, whoever saved them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.agents.checkpoint_files import checkpoints_in, main_file, newest_of
from lightning_agentrl.errors import ConfigError, Problem

WORDS = ("last", "best", "hpc")
_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError)
_MONITOR = "trainer.callbacks: [{class_path: RunCheckpoints, init_args: {monitor: val/success}}]"


def named_checkpoint(word: str, trainer: L.Trainer) -> Path | str:
    """Return the checkpoint that a word at `ckpt_path` stands for.

    Args:
        word: ``last``, ``best``, or ``hpc`` for one that SLURM's signal left, which Lightning finds by itself.
        trainer: its root and the folders in which its callbacks save and its first logger has its runs are searched,
            with all that is below them; its callbacks say what the best is.

    Raises:
        ConfigError: there is none.
    """
    if word == "last":
        return _last(trainer)
    if word == "best":
        return _best(trainer)
    if not any(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")):
        raise _none(f"there is no hpc_ckpt_*.ckpt in '{_shown(trainer.default_root_dir)}'")
    return word


def _last(trainer: L.Trainer) -> Path:
    """Return the newest checkpoint; by its link where there is one, so that a damaged one is skipped."""
    last = newest_of(_folders(trainer))
    if last is None:
        raise _none(f"there is no checkpoint below {_searched(trainer)}")
    return last


def _best(trainer: L.Trainer) -> Path:
    """Return the checkpoint with the best score among those that the newest ones of all folders name."""
    watching = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.monitor]
    if not watching:
        raise _none("no metric says which checkpoint is the best", f"add {_MONITOR}, or name a checkpoint")
    monitor, mode = watching[0].monitor, watching[0].mode
    scores: dict[Path, float] = {}
    for folder in _folders(trainer):
        for state in _states(folder):
            best, score = folder / Path(state["best_model_path"]).name, state.get("best_model_score")
            if state["monitor"] == monitor and score is not None and best.exists():
                scores[best] = float(score)
    found = {path: score for path, score in scores.items() if score == score}
    if not found:
        raise _none(f"no checkpoint below {_searched(trainer)} was the best by {monitor}")
    return (max if mode == "max" else min)(found, key=lambda path: found[path])


def _states(folder: Path) -> list[dict[str, Any]]:
    """Return what the callbacks that save knew as the newest readable checkpoint of a folder was saved."""
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            callbacks = torch.load(main_file(checkpoint), map_location="cpu", weights_only=True, mmap=True)["callbacks"]
        except (*_UNREADABLE, KeyError):
            continue
        return [state for state in callbacks.values() if isinstance(state, dict) and "best_model_path" in state]
    return []


def _folders(trainer: L.Trainer) -> Iterator[Path]:
    """Yield all folders below those of a run that hold checkpoints, each once."""
    seen = set()
    for root in _roots(trainer):
        for folder, inner, files in os.walk(root):
            whole = [name for name in inner if name.endswith(".ckpt")]  # a checkpoint may be a folder
            inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in whole)
            place = Path(folder).resolve()
            if place not in seen and (whole or any(name.endswith(".ckpt") for name in files)):
                seen.add(place)
                yield Path(folder)


def _roots(trainer: L.Trainer) -> list[str]:
    saving = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    # Where Lightning saves. Beside it there may be anything: `save_dir` of some loggers is the working folder.
    logging = [Path(logger.save_dir) / str(logger.name) for logger in trainer.loggers[:1] if logger.save_dir]
    return [str(root) for root in (trainer.default_root_dir, *saving, *logging) if root]


def _searched(trainer: L.Trainer) -> str:
    return " or ".join(f"'{root}'" for root in dict.fromkeys(map(_shown, _roots(trainer))))


def _shown(folder: str) -> str:
    return os.path.relpath(folder)


def _none(what: str, fix: str = "name a checkpoint, or leave ckpt_path out to start anew") -> ConfigError:
    return ConfigError(Problem(what, key="ckpt_path", fix=fix))
