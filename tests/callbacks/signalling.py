"""A signal in a chosen stage of a chosen iteration. A module of its own: configs name its class."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import lightning as L


class SignalAt(L.Callback):
    """Sends this process a signal once some of a stage is done.

    Args:
        stage: of the iteration, or ``saving``.
        iteration: counted from 0.
        done: items of the stage.
        rank: the only one that gets it.
        name: of the signal.
        seconds: later.
    """

    def __init__(
        self,
        stage: str,
        iteration: int,
        done: int = 1,
        rank: int = 0,
        name: str = "SIGTERM",
        seconds: float = 0.0,
    ) -> None:
        self.stage, self.iteration, self.done, self.rank = stage, iteration, done, rank
        self.number, self.seconds = signal.Signals[name], seconds
        self.sent = False

    def on_fit_start(self, trainer: L.Trainer, agent: Any) -> None:
        agent.clock.listeners.append(lambda stage, done, total: self._reached(trainer, stage, done))

    def on_save_checkpoint(self, trainer: L.Trainer, agent: Any, checkpoint: dict[str, Any]) -> None:
        self._reached(trainer, "saving", self.done)

    def _reached(self, trainer: L.Trainer, stage: str, done: int) -> None:
        here = (stage, trainer.current_epoch, trainer.global_rank) == (self.stage, self.iteration, self.rank)
        if not here or done < self.done or self.sent:
            return
        self.sent = True
        if self.seconds:
            timer = threading.Timer(self.seconds, os.kill, (os.getpid(), self.number))
            timer.daemon = True
            timer.start()
        else:
            os.kill(os.getpid(), self.number)
