"""The one hook that Lightning does not have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import lightning as L

from lightning_agentrl.types import Rollout


class RolloutCallback(L.Callback, ABC):
    """A callback that sees every collected rollout once, with scores and advantages, before the update."""

    @abstractmethod
    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        """Called on every rank with its own rows; the time it takes counts as stage ``log``."""
