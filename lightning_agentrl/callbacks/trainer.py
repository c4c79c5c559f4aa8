"""Trainer with default callbacks: progress, a report of rollouts, checkpoints, a clean stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar

from lightning_agentrl.agents.checks import refuse_foreign_keys
from lightning_agentrl.callbacks.progress import StageProgress
from lightning_agentrl.callbacks.rollout_report import RolloutReport
from lightning_agentrl.callbacks.run_checkpoints import CheckpointedTrainer, RunCheckpoints
from lightning_agentrl.callbacks.stop_on_signals import StopOnSignals
from lightning_agentrl.types.plain_config import check_kind

CALLBACKS = "trainer.callbacks"  # where a config has them
SAVE_EVERY = 5  # iterations, where a run says nothing about checkpoints
DEFAULTS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1}  # that suit agents, in place of Lightning's own


def with_defaults(given: Sequence[Callback], progress: bool = True, checkpoints: bool = True) -> list[Callback]:
    """Return the callbacks plus the missing default ones; `StopOnSignals` comes first.

    Args:
        given: of the run.
        progress: whether progress is shown.
        checkpoints: whether checkpoints are saved.
    """
    defaults: list[tuple[type, Callable[[], Callback], bool]] = [
        (ProgressBar, StageProgress, progress),
        (RolloutReport, RolloutReport, True),
        (ModelCheckpoint, partial(RunCheckpoints, every_n_epochs=SAVE_EVERY), checkpoints),
        (StopOnSignals, StopOnSignals, True),
    ]
    missing = [make() for kind, make, wanted in defaults if wanted and not any(isinstance(one, kind) for one in given)]
    # before others play episodes
    return sorted([*given, *missing], key=lambda callback: not isinstance(callback, StopOnSignals))


class Trainer(CheckpointedTrainer):
    """Lightning's Trainer with what `agentrl fit` adds to it: progress by stages, checkpoints between iterations.

    Args:
        callbacks: of the run; those that every run has are added if none of their kind is given.
        kwargs: what Lightning's Trainer takes.

    Raises:
        ConfigError: clips gradients or cuts batches, which agents do by themselves, or logs nothing.
    """

    def __init__(self, *, callbacks: Sequence[Callback] | Callback | None = None, **kwargs: Any) -> None:
        refuse_foreign_keys(kwargs)
        several = callbacks if isinstance(callbacks, Sequence) else [callbacks] if callbacks else []
        given = [check_kind(callback, Callback, CALLBACKS) for callback in several]
        progress = kwargs.get("enable_progress_bar") is not False
        checkpoints = kwargs.get("enable_checkpointing") is not False
        defaults = {**DEFAULTS, "enable_model_summary": False}
        super().__init__(callbacks=with_defaults(given, progress, checkpoints), **{**defaults, **kwargs})
