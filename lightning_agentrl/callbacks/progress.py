"""Progress that names the stage: two bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lightning_agentrl.agents import Agent

SHOWN = {
    "rollout/success_window": "success",
    "rollout/reward_per_turn": "reward/turn",
    "rollout/valid_action_ratio": "valid",
    "kl/reference": "kl",
    "critic/explained_variance": "explained",
    "val/success": "held-out success",
}
UNITS = {"collect": "turns", "score": "rows", "update": "rows", "validate": "episodes"}


class StageProgress(ProgressBar):
    """Iteration, phase and stage and how far each is, the main numbers of the last iteration, and the time left.

    ``success`` is that of the last 100 episodes.

    Args:
        line_seconds: where there is no terminal, seconds from one line inside an iteration to the next.
    """

    def __init__(self, line_seconds: float = 30.0) -> None:
        super().__init__()
        self.line_seconds = line_seconds
        self.console = Console(soft_wrap=True, highlight=False)
        self._enabled = True
        self._listening: Any = None
        self._bars: Progress | None = None
        self._run_bar = self._stage_bar = 0
        self._last_line = time.monotonic()
        self._started = time.monotonic()
        self._iteration_started: float | None = None
        self._durations: deque[float] = deque(maxlen=5)

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        agent = cast(Agent, pl_module)
        if not trainer.is_global_zero:
            self.disable()
        if self._listening is not agent.clock:  # fit and validate of one agent share its clock
            agent.clock.listeners.append(lambda name, done, total: self._show_stage(trainer, agent, name, done, total))
            self._listening = agent.clock

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._started = time.monotonic()
        self._durations.clear()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._iteration_started = time.monotonic()  # not at the end of the last one: other callbacks play in between

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._iteration_started is None or not self._enabled:  # a resumed run ends its last iteration once more
            return
        agent = cast(Agent, pl_module)
        self._durations.append(time.monotonic() - self._iteration_started)
        text = f"{self._head(trainer, agent)} | {self._numbers(trainer)} | {_minutes(self._durations[-1])}"
        if left := self._time_left(trainer):
            text += f", {left} left"
        self._line(text)
        if self._bars is not None:
            self._bars.update(cast(Any, self._run_bar), completed=trainer.current_epoch + 1)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._remove_bars()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._remove_bars()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Lightning prints results of validation with it."""
        if self._enabled:
            self.console.print(*args)

    # What is shown while a stage runs; called in the thread that does the work

    def _show_stage(self, trainer: L.Trainer, agent: Agent, stage: str, done: int, total: int) -> None:
        if not self._enabled or stage not in UNITS:
            return
        if self.console.is_terminal:
            self._move_bars(trainer, agent, stage, done, total)
        elif time.monotonic() - self._last_line >= self.line_seconds:
            of = f"/{total}" if total else ""
            self._line(f"{self._head(trainer, agent, stage)} | {stage} {done}{of} {UNITS[stage]}")

    def _move_bars(self, trainer: L.Trainer, agent: Agent, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bars = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
            self._run_bar = self._bars.add_task("", total=None, note="")
            self._stage_bar = self._bars.add_task("", total=None, note="")
            self._bars.start()
        epochs = trainer.max_epochs if trainer.training and trainer.max_epochs and trainer.max_epochs > 0 else None
        left = self._time_left(trainer)
        self._bars.update(
            cast(Any, self._run_bar),
            description=self._head(trainer, agent, stage),
            completed=trainer.current_epoch,
            total=epochs,
            note=" ".join([*([f"{left} left"] if left else []), self._numbers(trainer)]),
        )
        self._bars.update(
            cast(Any, self._stage_bar), description=stage, completed=done, total=total or None, note=UNITS[stage]
        )

    def _remove_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    # Texts

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self.console.print(text, markup=False)

    def _head(self, trainer: L.Trainer, agent: Agent, stage: str = "") -> str:
        if not trainer.training or stage == "validate":
            return "held-out episodes"
        of = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        return f"iteration {trainer.current_epoch + 1}{of} {agent.phase}"

    def _numbers(self, trainer: L.Trainer) -> str:
        metrics = trainer.callback_metrics
        return " ".join(f"{short} {float(metrics[name]):.3f}" for name, short in SHOWN.items() if name in metrics)

    def _time_left(self, trainer: L.Trainer) -> str:
        """By the median of the last iterations; empty before the first one and where the end is not known."""
        if not self._durations or not trainer.max_epochs or trainer.max_epochs < 0:
            return ""
        done = trainer.current_epoch + (1 if self._iteration_started is None else 0)
        return _minutes(statistics.median(self._durations) * max(trainer.max_epochs - done - 1, 0))


def _minutes(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
