"""Errors by type for checkpoints that cannot be read or written, whichever strategy does it and however it does it."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import Strategy
from torch.distributed.checkpoint.api import CheckpointException

from lightning_agentrl.errors import CheckpointError, CheckpointNotSavedError, one_line
from lightning_agentrl.errors.foreign_messages import cut_short, lacks_actor_state, out_of_memory

_UNREADABLE = (
    *(RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError),
    *(MisconfigurationException, CheckpointException),
)
_NOT_OURS = "cannot be read: it was not saved by agentrl fit, or is damaged"
_OTHER = "give model.init_args.model and model.init_args.critic as they were, or leave ckpt_path out"


def name_checkpoint_errors(strategy: Strategy, training: bool) -> None:
    """Make a strategy raise :class:`CheckpointError` and :class:`CheckpointNotSavedError` when it reads and writes.

    Args:
        strategy: of a trainer.
        training: whether checkpoints are read to continue training.
    """
    changed = cast(Any, strategy)
    changed.load_checkpoint = partial(
        _load, strategy.load_checkpoint, strategy.restore_checkpoint_after_setup, training
    )
    changed.save_checkpoint = partial(_save, strategy.save_checkpoint)


def _load(
    load: Callable[..., dict[str, Any]], sharded: bool, training: bool, checkpoint_path: Any, **kwargs: Any
) -> dict[str, Any]:
    try:
        checkpoint = load(checkpoint_path, **kwargs)
    except OSError as error:
        damaged = error.errno == errno.EINVAL  # the file ends before a position that is read
        reason = _NOT_OURS if damaged else f"cannot be read: {error.strerror or one_line(str(error))}"
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
        if sharded:  # such a strategy reads it into the models at once
            raise CheckpointError(
                f"does not fit this run, or is damaged: {one_line(str(error))[:300]}", _OTHER
            ) from error
        raise CheckpointError(_NOT_OURS) from error
    if "pytorch-lightning_version" not in checkpoint:
        raise CheckpointError(_NOT_OURS)
    if training and "lr_schedulers" not in checkpoint:
        raise CheckpointError(
            "has weights only, so training cannot continue from it",
            "save with save_weights_only false of ModelCheckpoint, or leave ckpt_path out",
        )
    return checkpoint


def _save(save: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, **kwargs: Any) -> None:
    try:
        save(checkpoint, filepath, **kwargs)
    except (OSError, RuntimeError, CheckpointException) as error:
        faults = [fault for fault, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if any(_disk_full(fault) for fault in faults):
            raise CheckpointNotSavedError(filepath) from error  # the error itself may name a temporary file, or none
        raise


def _disk_full(error: BaseException) -> bool:
    return cut_short(error) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))
