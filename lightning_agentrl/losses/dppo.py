"""DPPO: leave out tokens by how far their probability moved, not by its ratio."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss, log_ratio


def dppo_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, keep: Tensor, max_ratio: float = 20.0) -> Tensor:
    """Return ``-A sg(min(rho, max_ratio)) logps`` where ``keep``, else 0; any shape (arXiv 2602.04879)."""
    weight = log_ratio(logps.detach(), old_logps).exp().clamp_max(max_ratio)
    return torch.where(keep, -advantages * weight * logps, 0)


@torch.no_grad()
def tv_shift(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return ``|pi - mu|``: total variation between "this token" and "another one" under both policies, any shape."""
    return (logps.exp() - old_logps.exp()).abs()


@torch.no_grad()
def kl_shift(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return ``mu ln(mu / pi) + (1 - mu) ln((1 - mu) / (1 - pi))``, any shape.

    This is the KL between "this token" and "another one".
    """
    mu, other_mu, other_pi = old_logps.exp(), -torch.expm1(old_logps), -torch.expm1(logps)
    others = torch.xlogy(other_mu, other_mu) - torch.xlogy(other_mu, other_pi)  # 0 where mu is 1, also at pi = 1
    return mu * (old_logps - logps) + others


@torch.no_grad()
def inside_region(
    shift: Tensor, logps: Tensor, old_logps: Tensor, advantages: Tensor, limit_low: float, limit_high: float
) -> Tensor:
    """Return False where a token moved beyond its limit in the direction of its advantage; bool, any shape."""
    too_high = (advantages > 0) & (logps > old_logps) & (shift > limit_high)
    too_low = (advantages < 0) & (logps < old_logps) & (shift > limit_low)
    return ~(too_high | too_low)


class DPPO(PolicyLoss):
    """Base of the two forms of DPPO.

    Args:
        limit_low: how far the probability of a token with a negative advantage may fall.
        limit_high: how far that of one with a positive advantage may rise.
        max_ratio: upper bound of the importance weight.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
    """

    def __init__(self, limit_low: float, limit_high: float, max_ratio: float = 20.0, **mean: Any) -> None:
        super().__init__(**mean)
        self.limit_low, self.limit_high, self.max_ratio = limit_low, limit_high, max_ratio

    @abstractmethod
    def shift(self, logps: Tensor, old_logps: Tensor) -> Tensor:
        """Return how far each token moved; a constant."""

    def keep(self, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
        """Return :func:`inside_region` with these limits."""
        shift = self.shift(logps, old_logps)
        return inside_region(shift, logps, old_logps, advantages, self.limit_low, self.limit_high)

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        keep = self.keep(logps_BA, old_logps_BA, advantages_BA)
        return dppo_loss(logps_BA, old_logps_BA, advantages_BA, keep, self.max_ratio)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Mark tokens that are left out."""
        return {"clip_fraction": 1.0 - self.keep(logps_BA, old_logps_BA, advantages_BA).float()}


class DPPOTV(DPPO):
    """DPPO by total variation: leaves a token out once its probability has moved by more than a limit.

    Args:
        limit_low: how far the probability of a token with a negative advantage may fall.
        limit_high: how far that of one with a positive advantage may rise.
        max_ratio: upper bound of the importance weight.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
    """

    def __init__(self, limit_low: float = 0.15, limit_high: float = 0.15, max_ratio: float = 20.0, **mean: Any) -> None:
        super().__init__(limit_low, limit_high, max_ratio, **mean)

    def shift(self, logps: Tensor, old_logps: Tensor) -> Tensor:
        return tv_shift(logps, old_logps)


class DPPOKL(DPPO):
    """DPPO by KL: limits are in nats.

    Args:
        limit_low: KL up to which the probability of a token with a negative advantage may fall.
        limit_high: KL up to which that of one with a positive advantage may rise.
        max_ratio: upper bound of the importance weight.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
    """

    def __init__(self, limit_low: float = 0.05, limit_high: float = 0.05, max_ratio: float = 20.0, **mean: Any) -> None:
        super().__init__(limit_low, limit_high, max_ratio, **mean)

    def shift(self, logps: Tensor, old_logps: Tensor) -> Tensor:
        return kl_shift(logps, old_logps)
