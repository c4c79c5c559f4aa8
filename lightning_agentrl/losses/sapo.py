"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss
from lightning_agentrl.losses.precision import log_ratio


def sapo_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Return ``-A (4 / tau) sigmoid(tau (rho - 1))``, any shape (arXiv 2511.20347).

    ``tau`` is ``tau_positive`` where A > 0, else ``tau_negative``. At ``rho = 1`` the gradient is that of PPO; it fades
    on both sides, faster for a larger ``tau``.
    """
    ratio = log_ratio(logps, old_logps).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


class SAPO(PolicyLoss):
    """A gate that closes smoothly as the ratio leaves 1, sooner for negative advantages.

    Args:
        tau_positive: steepness of the gate for positive advantages.
        tau_negative: steepness for the others.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
    """

    def __init__(self, tau_positive: float = 1.0, tau_negative: float = 1.05, **mean: Any) -> None:
        super().__init__(**mean)
        if not tau_positive > 0 or not tau_negative > 0:
            raise ValueError(
                f"SAPO: tau_positive and tau_negative must be above 0, got {tau_positive} and {tau_negative}"
            )
        self.tau_positive, self.tau_negative = tau_positive, tau_negative

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return sapo_loss(logps_BA, old_logps_BA, advantages_BA, self.tau_positive, self.tau_negative)
