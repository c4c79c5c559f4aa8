"""How a strategy saves and loads: a checkpoint is whole or not there, and what cannot be done is an error by type."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException

from lightning_agentrl.agents import checkpoint_files as files
from lightning_agentrl.agents.checkpoint_code import check_folder
from lightning_agentrl.distributed import all_gather, raise_once
from lightning_agentrl.errors import CheckpointError, CheckpointNotSavedError, one_line
from lightning_agentrl.errors.foreign_messages import disk_full, lacks_actor_state, not_plain, out_of_memory
from lightning_agentrl.stalls import waiting_for

_UNREADABLE = (
    *(RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError),
    *(MisconfigurationException, CheckpointException),
)
_PLAIN = "give plain types in the state_dict of your callbacks, and in what else code of yours adds to it"


class StraightToDisk(TorchCheckpointIO):
    """Writes a file where it is told to; Lightning's own makes a copy in memory and another in the system's folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            torch.save(checkpoint, path)


def guard_checkpoints(trainer: L.Trainer) -> None:
    """Make a trainer's strategy save whole checkpoints only and refuse damaged ones; remove what killed saves left.

    Every rank must call it once the folders of checkpoints are known. Called again, it does nothing new.
    """
    strategy = cast(Any, trainer.strategy)
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = StraightToDisk()
    if not isinstance(strategy.save_checkpoint, partial):
        strategy.load_checkpoint = partial(_load, trainer, strategy.load_checkpoint)
        strategy.save_checkpoint = partial(_save, trainer, strategy.save_checkpoint)
    if trainer.is_global_zero and trainer.state.fn == TrainerFn.FITTING:
        for folder in files.folders_of(trainer):
            files.clean(folder)


# Saving


def _save(
    trainer: L.Trainer, save: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, **kwargs: Any
) -> None:
    """Let the strategy write beside the target, read that back, and rename it; all ranks must call it."""
    name = str(trainer.strategy.broadcast(str(filepath)))
    if "://" in name:  # not in a folder, so nothing can be renamed
        save(checkpoint, name, **kwargs)
        return
    target = Path(name).absolute()
    with _together(trainer, target):
        if trainer.is_global_zero:
            target.parent.mkdir(parents=True, exist_ok=True)
    if not trainer.is_global_zero:
        _write(trainer, partial(save, checkpoint, **kwargs), target)
        return
    with files.saving_in(target.parent), waiting_for(f"the checkpoint {target} to be written"):
        try:
            _write(trainer, partial(save, checkpoint, **kwargs), target)
        except BaseException:
            files.remove(files.part_of(target))  # a full disk is to have the space again
            raise


def _write(trainer: L.Trainer, save: Callable[..., None], target: Path) -> None:
    part, rank, world = files.part_of(target), trainer.global_rank, trainer.world_size
    with _together(trainer, target):
        if rank == 0:
            files.remove(part)
    with _together(trainer, target):
        save(filepath=part)
    with _together(trainer, target):
        sealed = files.seal(part, rank, world)
    manifest = {name: checksum for share in all_gather(sealed) for name, checksum in share.items()}
    with _together(trainer, target):
        if rank == 0 and part.is_dir():
            files.write_manifest(part, manifest)
    with _together(trainer, target):
        if rank == 0 or part.is_dir():
            files.sync(part)
    with _together(trainer, target):
        if reason := files.damage(part, rank, world):
            raise OSError(errno.EIO, reason)
    if rank == 0 and (kind := _unread(part)):
        rank_zero_warn(f"agentrl fit cannot continue from this checkpoint: it holds an object of {kind}; {_PLAIN}")
    with _together(trainer, target):
        if rank == 0:
            files.put_in_place(part, target)
    setattr(trainer.strategy, files.LAST_SAVED, target)


def _unread(part: Path) -> str:
    """Return what makes an object that a run does not read from a checkpoint; empty if all can be read."""
    try:
        if part.is_dir():
            check_folder(part)
        else:
            torch.load(part, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, *_UNREADABLE) as error:  # others are damage, which was looked for
        return not_plain(error)
    return ""


@contextmanager
def _together(trainer: L.Trainer, target: Path) -> Iterator[None]:
    """Go on when all ranks have done this, or raise on all if one cannot.

    Raises:
        CheckpointNotSavedError: the disk is full or broken; the error itself may name no file.
    """
    with raise_once():
        try:
            yield
        except (OSError, RuntimeError, CheckpointException) as error:
            parts = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
            faults = [fault for fault, _ in parts]
            broken = any(isinstance(fault, OSError) and fault.errno == errno.EIO for fault in faults)
            full = any(map(disk_full, faults))
            if full or broken:
                code = errno.ENOSPC if full else errno.EIO
                raise CheckpointNotSavedError(target, code, files.last_good_checkpoint(trainer)) from error
            raise


# Loading


def _load(trainer: L.Trainer, load: Callable[..., dict[str, Any]], checkpoint_path: Any, **kwargs: Any) -> Any:
    strategy, training = trainer.strategy, trainer.state.fn == TrainerFn.FITTING
    if kwargs.get("weights_only", False) is None:
        kwargs["weights_only"] = True  # with None, Lightning unpickles what comes from a URL
    try:
        whole = _whole(trainer, checkpoint_path)
        with raise_once():
            check_folder(Path(str(whole)))
        checkpoint = load(whole, **kwargs)
    except CheckpointError:
        raise
    except OSError as error:
        damaged = error.errno == errno.EINVAL  # the file ends before a position that is read
        reason = files.NOT_OURS if damaged else f"cannot be read: {error.strerror or one_line(str(error))}"
        raise CheckpointError(reason) from error
    except _UNREADABLE as error:
        if out_of_memory(error):
            raise
        if lacks_actor_state(error):
            raise CheckpointError(
                "was written inside the critic warm-up by one process or DDP, where the actor has no Adam state yet, "
                "and ModelParallelStrategy needs that of all weights",
                "continue it with trainer.strategy 'auto' or 'ddp' to the end of the warm-up, or leave ckpt_path out",
            ) from error
        if kind := not_plain(error):
            raise CheckpointError(f"cannot be read: it holds an object of {kind}", _PLAIN) from error
        if strategy.restore_checkpoint_after_setup:  # such a strategy reads it into the models at once
            raise CheckpointError(
                f"does not fit this run, or is damaged: {one_line(str(error))[:300]}", files.OTHER_MODEL
            ) from error
        raise CheckpointError(files.NOT_OURS) from error
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(files.NOT_OURS)
    if training and "lr_schedulers" not in checkpoint:
        raise CheckpointError(
            "has weights only, so training cannot continue from it",
            "save with save_weights_only false of ModelCheckpoint, or leave ckpt_path out",
        )
    return checkpoint


def _whole(trainer: L.Trainer, checkpoint_path: Any) -> Any:
    """Return the checkpoint if it is whole. In place of a damaged one that a link names, return the one before it.

    A link such as ``last.ckpt`` stands for the newest checkpoint, any other name for this one and none else. All ranks
    must call it, and each reads its share of the files.

    Raises:
        CheckpointError: it is damaged; names another one that is whole.
    """
    name = str(trainer.strategy.broadcast(str(checkpoint_path)))
    if "://" in name:
        return checkpoint_path
    given = Path(name)
    reason = _damage(trainer, given)
    if not reason:
        return checkpoint_path
    damaged = given.resolve()
    found = {path for folder in (damaged.parent, given.absolute().parent) for path in files.checkpoints_in(folder)}
    others = [path for path in files.in_order(found) if path.resolve() != damaged]
    before = next((path for path in reversed(others) if not _damage(trainer, path)), None)
    if before is None:
        raise CheckpointError(reason)
    if not given.is_symlink():
        raise CheckpointError(reason, f"the newest one beside it that is whole is '{before}'")
    rank_zero_warn(f"the checkpoint '{damaged}' {reason}; continuing from the one before it, '{before}'")
    cast(Any, trainer)._checkpoint_connector._ckpt_path = str(before)  # which is then not removed
    return before


def _damage(trainer: L.Trainer, checkpoint: Path) -> str:
    with raise_once():
        own = files.damage(checkpoint, trainer.global_rank, trainer.world_size)
    return next(filter(None, all_gather(own)), "")
