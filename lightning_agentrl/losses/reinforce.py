"""REINFORCE (also the loss of GPG), and losses that clip, gate or penalize the ratio: CISPO, SAPO and DRO."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss, log_ratio


def reinforce_loss(logps: Tensor, advantages: Tensor) -> Tensor:
    """Return ``-A logps``, any shape (GPG: arXiv 2504.02546)."""
    return -advantages * logps


class Reinforce(PolicyLoss):
    """The plain policy gradient without importance ratios; use it with one optimizer step per rollout."""

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return reinforce_loss(logps_BA, advantages_BA)


def cispo_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, clip_low: float = 1.0, clip_high: float = 0.28
) -> Tensor:
    """Return ``-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logps``, any shape (arXiv 2506.13585).

    ``rho = exp(logps - old_logps)`` is a constant here, so a clipped token keeps its gradient. With ``clip_low`` of at
    least 1 there is no lower bound.
    """
    weight = log_ratio(logps.detach(), old_logps).exp().clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logps


class CISPO(PolicyLoss):
    """REINFORCE with clipped importance weights: clipped tokens keep a gradient, so rare tokens are still learned.

    Args:
        clip_low: distance of the lower bound of the weight from 1; no lower bound if at least 1.
        clip_high: distance of the upper bound of the weight from 1.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    def __init__(self, clip_low: float = 1.0, clip_high: float = 0.28, **mean: Any) -> None:
        super().__init__(**mean)
        self.clip_low, self.clip_high = clip_low, clip_high

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return cispo_loss(logps_BA, old_logps_BA, advantages_BA, self.clip_low, self.clip_high)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Return 1 for tokens whose weight is clipped, as ``clip_fraction``."""
        ratio = log_ratio(logps_BA.detach(), old_logps_BA).exp()
        return {"clip_fraction": ((ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)).float()}


def sapo_loss(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Return ``-A (4 / tau) sigmoid(tau (rho - 1))``, any shape (arXiv 2511.20347).

    ``tau`` is ``tau_positive`` if A > 0, else ``tau_negative``. At ``rho = 1`` the gradient is that of PPO; it decays
    on both sides, faster for a larger ``tau``.
    """
    ratio = log_ratio(logps, old_logps).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


class SAPO(PolicyLoss):
    """Policy gradient with a smooth gate that decays as the ratio moves away from 1, faster for negative advantages.

    Args:
        tau_positive: steepness of the gate for positive advantages.
        tau_negative: steepness of the gate for other advantages.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    def __init__(self, tau_positive: float = 1.0, tau_negative: float = 1.05, **mean: Any) -> None:
        super().__init__(**mean)
        self.tau_positive, self.tau_negative = tau_positive, tau_negative

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return sapo_loss(logps_BA, old_logps_BA, advantages_BA, self.tau_positive, self.tau_negative)


def dro_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """Return ``-(A logps - beta / 2 (logps - old_logps)^2)``, any shape (arXiv 2405.19107)."""
    return beta / 2 * log_ratio(logps, old_logps).square() - advantages * logps


class DRO(PolicyLoss):
    """Policy gradient with a quadratic penalty on the distance to the old policy, for off-policy data.

    Args:
        beta: weight of the penalty.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    def __init__(self, beta: float, **mean: Any) -> None:
        super().__init__(**mean)
        self.beta = beta

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return dro_loss(logps_BA, old_logps_BA, advantages_BA, self.beta)
