"""DRO: a penalty on the squared log-ratio in place of a clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss
from lightning_agentrl.losses.precision import log_ratio


def dro_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """Return ``-(A logps - beta / 2 (logps - old_logps)^2)``, any shape (arXiv 2405.19107)."""
    return beta / 2 * log_ratio(logps, old_logps).square() - advantages * logps


class DRO(PolicyLoss):
    """Policy gradient with a quadratic pull back to the old policy, for off-policy data.

    Args:
        beta: weight of the pull.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
    """

    def __init__(self, beta: float, **mean: Any) -> None:
        super().__init__(**mean)
        if not beta > 0:
            raise ValueError(f"DRO: beta must be above 0, got {beta}")
        self.beta = beta

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return dro_loss(logps_BA, old_logps_BA, advantages_BA, self.beta)
