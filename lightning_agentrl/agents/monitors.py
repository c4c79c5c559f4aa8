"""Metrics that a run is steered by: those that have no value in an iteration are waited for.

Some are means over episodes that end, and in an iteration none may end; some come with a validation, or once the actor
is trained. Lightning takes the value of an earlier iteration for a new one, and a metric that is still to come for one
that nobody logs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_agentrl.agents.metrics_of_run import WINDOW
from lightning_agentrl.metrics.rollout import PER_EPISODE, comes_with_episodes
from lightning_agentrl.rollout import Phase

_OF_THE_ACTOR = ("policy/", "mismatch/", "variance_proxy/", "grad_norm/actor")  # not logged in the critic warm-up
_ACTS = ((EarlyStopping, "_run_early_stopping_check"), (ModelCheckpoint, "_save_topk_checkpoint"))


class Monitors:
    """What has been logged in this iteration, and whether what has not is still to come."""

    def __init__(self) -> None:
        self._now: set[str] = set()  # logged in this iteration
        self._ever: set[str] = set()  # logged in this run
        self._announced: set[tuple[str, str]] = set()  # who waits for which metric

    def begin_run(self) -> None:
        self._now, self._ever = set(), set()

    def begin_iteration(self) -> None:
        self._now = set()

    def logged(self, name: str) -> None:
        self._now.add(name)
        self._ever.add(name)

    def value(self, name: str, metrics: Mapping[str, Tensor], phase: Phase, watcher: str) -> Tensor | None:
        """Return the value of a metric in this iteration; None if it has none, but had one or may have one later.

        Args:
            name: of the metric.
            metrics: of the run so far, as callbacks see them.
            phase: of the iteration.
            watcher: who asks, to be told that it waits.

        Raises:
            ValueError: nothing logs it.
        """
        if name in self._now or (name in metrics and name not in self._ever):  # the second: not logged by the agent
            return metrics.get(name)  # none before the mean over an iteration is taken
        if not self._now or name in self._ever:  # a resumed run ends its last iteration once more, with nothing done
            return None
        later = (
            (comes_with_episodes(name) and "rollout/success" not in self._now)
            or name == WINDOW  # there once enough episodes are known
            or name.startswith("env/")  # whatever environments report, or only some of them
            or (name.startswith("val/") and not any(other.startswith("val/") for other in self._ever))
            or (phase == "critic_warmup" and name.startswith(_OF_THE_ACTOR))
        )
        if not later:
            known = sorted({*metrics, *PER_EPISODE, WINDOW})
            raise ValueError(
                f"`{watcher}(monitor={name!r})` could not find the monitored key in the returned metrics: {known}"
            )
        if (watcher, name) not in self._announced:
            self._announced.add((watcher, name))
            rank_zero_info(f"{watcher} waits for the first value of {name}")
        return None


def let_callbacks_wait(trainer: L.Trainer, value: Callable[[str, str], Tensor | None]) -> None:
    """Let Lightning's callbacks act only in iterations in which their metric has a value.

    Args:
        trainer: with its callbacks.
        value: of a metric in this iteration, given its name and who asks; None if it has none.
    """
    for callback in cast(list[Any], cast(Any, trainer).callbacks):
        if isinstance(callback, EarlyStopping) and not callback.monitor.startswith("val/"):
            callback._check_on_train_epoch_end = True  # by default only where every iteration has a validation
        for kind, act in _ACTS:
            if isinstance(callback, kind):
                own = getattr(callback, act)
                own = own.args[1] if isinstance(own, partial) else own  # of an earlier run
                setattr(callback, act, partial(_act_on_a_value, callback, own, value))


def _act_on_a_value(
    callback: Any, act: Callable[..., None], value: Callable[[str, str], Tensor | None], *args: Any, **kwargs: Any
) -> None:
    strict = getattr(callback, "strict", True)  # else a metric that nobody logs is the user's own choice
    if callback.monitor is None or not strict or value(callback.monitor, type(callback).__name__) is not None:
        act(*args, **kwargs)
