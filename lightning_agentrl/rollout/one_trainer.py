"""What takes part in a run belongs to the Trainer of that run until it ends."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerStatus


def is_running(trainer: Any) -> bool:
    """Return whether it is a Trainer inside a run, which has not failed."""
    return isinstance(trainer, L.Trainer) and trainer.state.status is TrainerStatus.RUNNING


def check_free(part: Any, running: Any, other: Any) -> None:
    """Refuse a second Trainer inside a run, such as in a callback: Lightning would log, play and end in it.

    Args:
        part: agent or data module.
        running: its Trainer until now, if it has one.
        other: its Trainer from now on; None: it gets none.

    Raises:
        ValueError: they are two, and the first one is running.
    """
    if is_running(running) and other is not None and other is not running:
        raise ValueError(
            f"this {type(part).__name__} is in a run of another Trainer, so a second one cannot take it before that "
            "ends; give the second one copy.deepcopy(agent) and a new RolloutDataModule"
        )
