"""The base of all estimators: a strategy object that declares what it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from lightning_agentrl.types import Rollout


class AdvantageEstimator(ABC):
    """Scored rollout -> advantages and returns.

    Class attributes say what the agent must compute or collect; it computes exactly that.

    Args:
        whiten: give the advantages mean 0 and variance 1 over all action tokens of all ranks.
    """

    needs_values: ClassVar[bool] = False

    def __init__(self, whiten: bool = True) -> None:
        self.whiten = whiten

    @abstractmethod
    def estimate(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, A], 0 off the action mask, before whitening."""
