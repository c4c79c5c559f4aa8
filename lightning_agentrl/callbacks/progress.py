"""Progress by stages: two bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.metrics_of_run import WINDOW
from lightning_agentrl.metrics.stages import StageClock

SHOWN = {
    WINDOW: "success",
    "rollout/reward_per_turn": "reward/turn",
    "rollout/valid_action_ratio": "valid",
    "kl/reference": "kl",
    "critic/explained_variance": "explained",
    "clone/cross_entropy": "cross-entropy",
    "val/success": "held-out success",
}
UNITS = {"score": "rows", "update": "rows", "validate": "episodes"}
LINE_SECONDS = 30.0  # interval of lines inside an iteration, without a terminal


class StageProgress(ProgressBar):
    """Progress of iteration, phase and stage, the main metrics of the last iteration, and the time left.

    ``success`` is the success rate of the last 100 episodes that began before all running episodes, or a dash if there
    are fewer than 20 such episodes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.console = _Output(soft_wrap=True, highlight=False)
        self._enabled = True
        self._clock: StageClock | None = None
        self._listener: Callable[[str, int, int], None] = lambda name, done, total: None
        self._moved = 0.0  # time of the last update of the bars
        self._bars: Progress | None = None
        self._run_bar = self._stage_bar = 0
        self._last_line = time.monotonic()
        self._iteration_started: float | None = None
        self._durations: deque[float] = deque(maxlen=5)  # seconds of recent training iterations

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        agent = cast(Agent, pl_module)
        if not trainer.is_global_zero:
            self.disable()
        self._stop_listening()
        self._clock = agent.clock
        self._listener = lambda name, done, total: self._show_stage(trainer, agent, name, done, total)
        agent.clock.listeners.append(self._listener)
        self._iteration_started = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._durations.clear()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._iteration_started = time.monotonic()  # set here to exclude the time of callbacks between iterations

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The time is None if a resumed run ends its last iteration once more.
        if self._iteration_started is None or not self._enabled:
            return
        agent = cast(Agent, pl_module)
        took = time.monotonic() - self._iteration_started
        if agent.phase == "train":  # durations of warm-up and training iterations are not comparable
            self._durations.append(took)
        text = f"{self._head(trainer, agent)} | {self._numbers(trainer)} | took {_minutes(took)}"
        text += self._time_left(trainer, agent, trainer.current_epoch + 1)
        self._line(text)
        if self._bars is not None:
            self._bars.update(cast(Any, self._run_bar), completed=trainer.current_epoch + 1)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._remove_bars()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._remove_bars()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._clock is not None and self._listener in self._clock.listeners:
            self._clock.listeners.remove(self._listener)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print text from Lightning, such as results of a validation."""
        if self._enabled:
            self.console.print(*args)

    # Display during a stage; called in the thread that does the work

    def _show_stage(self, trainer: L.Trainer, agent: Agent, stage: str, done: int, total: int) -> None:
        if not self._enabled or stage == "log":
            return
        if self.console.is_terminal:
            self._move_bars(trainer, agent, stage, done, total)
        elif time.monotonic() - self._last_line >= LINE_SECONDS:
            of = f"/{total}" if total else ""
            self._line(f"{self._head(trainer, agent, stage)} | {stage} {done}{of} {_unit(agent, stage)}")

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
        if time.monotonic() - self._moved < 0.2 and done not in (0, total):
            return
        self._moved = time.monotonic()
        left = self._time_left(trainer, agent, trainer.current_epoch).removeprefix(", ")
        self._bars.update(
            cast(Any, self._run_bar),
            description=self._head(trainer, agent, stage),
            completed=trainer.current_epoch,
            total=agent.datamodule.planned_iterations if trainer.training else None,
            note=f"{left} {self._numbers(trainer)}".strip(),
        )
        self._bars.update(
            cast(Any, self._stage_bar), description=stage, completed=done, total=total or None, note=_unit(agent, stage)
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
        epochs = agent.datamodule.planned_iterations
        of = f"/{epochs}" if epochs else ""
        return f"iteration {trainer.current_epoch + 1}{of} {agent.phase}"

    def _numbers(self, trainer: L.Trainer) -> str:
        metrics = trainer.callback_metrics
        texts = {name: f"{float(metrics[name]):z.3f}" for name in SHOWN if name in metrics}  # the flag z avoids -0.000
        if trainer.training and "rollout/reward_per_turn" in texts:
            texts.setdefault(WINDOW, "-")
        return " ".join(f"{short} {texts[name]}" for name, short in SHOWN.items() if name in texts)

    def _time_left(self, trainer: L.Trainer, agent: Agent, done: int) -> str:
        """Return the time left, estimated by the median of recent training iterations; empty if it is unknown."""
        epochs = agent.datamodule.planned_iterations
        if not self._durations or not epochs or self._iteration_started is None:
            return ""
        seconds = statistics.median(self._durations) * (epochs - done)
        if done == trainer.current_epoch:  # inside an iteration
            seconds -= time.monotonic() - self._iteration_started
        return f", {_minutes(max(seconds, 0.0))} left"


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error; rich would end the process without a message."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def _unit(agent: Agent, stage: str) -> str:
    return agent.datamodule.sizes.unit if stage == "collect" else UNITS[stage]


def _minutes(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
