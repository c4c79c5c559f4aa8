"""What every run has besides its own callbacks: progress, a report of rollouts, checkpoints, a chain, a clean stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger

from lightning_agentrl.agents.trainer_keys import refuse_foreign_keys
from lightning_agentrl.callbacks.chain import Chain
from lightning_agentrl.callbacks.progress import StageProgress
from lightning_agentrl.callbacks.rollout_report import RolloutReport
from lightning_agentrl.callbacks.run_checkpoints import RunCheckpoints
from lightning_agentrl.callbacks.stop_on_signals import StopOnSignals
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.errors.unknown import nameless
from lightning_agentrl.types.plain_config import from_plain

CALLBACKS, LOGGER = "trainer.callbacks", "trainer.logger"  # where a config has them
DEFAULTS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1}  # that suit agents, in place of Lightning's own


def with_defaults(given: Sequence[Callback], progress: bool = True, checkpoints: bool = True) -> list[Callback]:
    """Return callbacks with those that every run has and none of these is; what stops on signals comes first.

    Args:
        given: of the run.
        progress: whether progress is shown.
        checkpoints: whether checkpoints are saved.
    """
    defaults: list[tuple[type, type[Callback], bool]] = [
        (ProgressBar, StageProgress, progress),
        (RolloutReport, RolloutReport, True),
        (ModelCheckpoint, RunCheckpoints, checkpoints),
        (Chain, Chain, True),
        (StopOnSignals, StopOnSignals, True),
    ]
    missing = [make() for kind, make, wanted in defaults if wanted and not any(isinstance(one, kind) for one in given)]
    # before others play episodes
    return sorted([*given, *missing], key=lambda callback: not isinstance(callback, StopOnSignals))


class Trainer(L.Trainer):
    """Lightning's Trainer with what `agentrl fit` adds to it: progress by stages, checkpoints between iterations.

    With ``max_epochs`` held-out episodes are played after the last iteration, unless ``check_val_every_n_epoch`` says
    otherwise, and with ``max_steps`` alone after each: a validation plays whole episodes, which takes as long as
    several iterations.

    Args:
        callbacks: of the run, or what a config would say of them; those that every run has are added where none of
            their kind is given.
        kwargs: what Lightning's Trainer takes; loggers may also be what a config would say of them.

    Raises:
        ConfigError: clips gradients or cuts batches, which agents do by themselves, or logs nothing.
    """

    def __init__(self, *, callbacks: Sequence[Callback] | Callback | None = None, **kwargs: Any) -> None:
        refuse_foreign_keys(kwargs)
        several: list[Any] = [*callbacks] if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
        given = [_callback(callback) for callback in several]
        if (logger := kwargs.get("logger")) is not None and not isinstance(logger, bool):
            listed = isinstance(logger, Iterable) and not isinstance(logger, str | Mapping)
            loggers = [from_plain(one, Logger, LOGGER) for one in (logger if listed else [logger])]
            kwargs["logger"] = loggers if listed else loggers[0]
        progress = kwargs.get("enable_progress_bar") is not False
        checkpoints = kwargs.get("enable_checkpointing") is not False
        last = kwargs.get("max_epochs")
        defaults = {**DEFAULTS, "enable_model_summary": False}
        if last is not None and last > 0 and "val_check_interval" not in kwargs:
            defaults["check_val_every_n_epoch"] = last
        super().__init__(callbacks=with_defaults(given, progress, checkpoints), **{**defaults, **kwargs})


def _callback(given: Any) -> Callback:
    made: Callback = from_plain(given, Callback, CALLBACKS)
    if made is not given and type(made) is Callback:  # which the parser takes for a mapping without a class_path
        raise ConfigError(nameless(next(iter(given), ""), CALLBACKS, Callback))
    return made
