"""The run that an agent is in: which it is, what it is made of, and how far it has come. Checkpoints hold all of it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_agentrl.agents.checkpoints import KEY
from lightning_agentrl.agents.optim import Optim, Steps
from lightning_agentrl.agents.recent_episodes import RecentEpisodes
from lightning_agentrl.agents.resume import check_changes
from lightning_agentrl.distributed import all_gather, raise_once


class Run:
    """A run from its beginning to its end, however often it is continued; each fit without a checkpoint is another one.

    Args:
        optim: learning rates and limits of its steps.
    """

    def __init__(self, optim: Optim) -> None:
        self.id = ""  # made where the run begins
        self.made_of: dict[str, Any] = {}  # settings, base weights and versions
        self.steps = Steps(optim)
        self.recent_episodes = RecentEpisodes()

    def begin(self, trainer: L.Trainer) -> None:
        """Become another run, until a checkpoint is loaded; every rank must call it."""
        self.id = all_gather(uuid.uuid4().hex[:12])[0]
        if trainer.global_step == 0:
            self.steps.begin_anew()
            self.recent_episodes.begin_anew()

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a checkpoint, but for what the run is made of, which stands with the agent's own."""
        return {"run_id": self.id, "recent_episodes": self.recent_episodes.state_dict(), **self.steps.state_dict()}

    def go_on_from(self, checkpoint: Mapping[str, Any], trainer: L.Trainer, accepted: Sequence[str]) -> None:
        """Become the run of a checkpoint; every rank must call it.

        Args:
            checkpoint: whole.
            trainer: of this run.
            accepted: keys of the config that may differ where training goes on, or the beginnings of such keys.

        Raises:
            CheckpointError: training would go on with something else than was accepted.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            with raise_once():
                if trainer.is_global_zero:
                    check_changes(checkpoint[KEY], self.made_of, accepted)
        self.id = checkpoint["run_id"]
        self.recent_episodes.load_state_dict(checkpoint["recent_episodes"])
        self.steps.load_state_dict(checkpoint)
