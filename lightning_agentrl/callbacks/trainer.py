"""Trainer with default callbacks: progress, reports of rollouts, checkpoints, and a clean stop at signals."""

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

CALLBACKS = "trainer.callbacks"  # config key of the callbacks
SAVE_EVERY = 5  # iterations between checkpoints, if no checkpoint callback is given
DEFAULTS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1}  # defaults for agents, instead of Lightning's


def with_defaults(given: Sequence[Callback], progress: bool = True, checkpoints: bool = True) -> list[Callback]:
    """Return the callbacks plus the missing default ones; `StopOnSignals` comes first.

    Args:
        given: callbacks of the run.
        progress: whether to show progress.
        checkpoints: whether to save checkpoints.
    """
    defaults: list[tuple[type, Callable[[], Callback], bool]] = [
        (ProgressBar, StageProgress, progress),
        (RolloutReport, RolloutReport, True),
        (ModelCheckpoint, partial(RunCheckpoints, every_n_epochs=SAVE_EVERY), checkpoints),
        (StopOnSignals, StopOnSignals, True),
    ]
    missing = [make() for kind, make, wanted in defaults if wanted and not any(isinstance(one, kind) for one in given)]
    # `StopOnSignals` must come before callbacks that play episodes.
    return sorted([*given, *missing], key=lambda callback: not isinstance(callback, StopOnSignals))


class Trainer(CheckpointedTrainer):
    """Lightning's Trainer with the callbacks of `agentrl fit`: progress by stages, checkpoints between iterations.

    Args:
        callbacks: callbacks of the run; default callbacks are added if none of their class is given.
        kwargs: arguments of Lightning's Trainer.

    Raises:
        ConfigError: an argument is not supported, such as gradient clipping, which is an argument of the agent.
    """

    def __init__(self, *, callbacks: Sequence[Callback] | Callback | None = None, **kwargs: Any) -> None:
        refuse_foreign_keys(kwargs)
        several = callbacks if isinstance(callbacks, Sequence) else [callbacks] if callbacks else []
        given = [check_kind(callback, Callback, CALLBACKS) for callback in several]
        progress = kwargs.get("enable_progress_bar") is not False
        checkpoints = kwargs.get("enable_checkpointing") is not False
        defaults = {**DEFAULTS, "enable_model_summary": False}
        super().__init__(callbacks=with_defaults(given, progress, checkpoints), **{**defaults, **kwargs})
