"""A signal in a chosen stage of a chosen iteration. A module of its own: configs name its class."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L


class SignalAt(L.Callback):
    """Sends this process a signal once some of a stage is done.

    Args:
        stage: of the iteration.
        iteration: counted from 0.
        done: items of the stage.
        rank: the only one that gets it.
        name: of the signal.
    """

    def __init__(self, stage: str, iteration: int, done: int = 1, rank: int = 0, name: str = "SIGTERM") -> None:
        self.stage, self.iteration, self.done, self.rank = stage, iteration, done, rank
        self.number = signal.Signals[name]
        self.sent = False

    def on_fit_start(self, trainer: L.Trainer, agent: Any) -> None:
        def listen(stage: str, done: int, total: int) -> None:
            here = (stage, trainer.current_epoch, trainer.global_rank) == (self.stage, self.iteration, self.rank)
            if here and done >= self.done and not self.sent:
                self.sent = True
                os.kill(os.getpid(), self.number)

        agent.clock.listeners.append(listen)
