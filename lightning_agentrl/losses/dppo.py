"""DPPO: mask tokens by the change of their probability instead of its ratio."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss, log_ratio


def dppo_loss(logps: Tensor, old_logps: Tensor, advantages: Tensor, keep: Tensor, max_ratio: float = 20.0) -> Tensor:
    """Return ``-A sg(min(rho, max_ratio)) logps`` for kept tokens, else 0; any shape (arXiv 2602.04879)."""
    weight = log_ratio(logps.detach(), old_logps).exp().clamp_max(max_ratio)
    return torch.where(keep, -advantages * weight * logps, 0)


@torch.no_grad()
def tv_shift(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return ``|pi - mu|``, the total variation of "this token or another" between both policies; any shape."""
    return (logps.exp() - old_logps.exp()).abs()


@torch.no_grad()
def kl_shift(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return ``mu ln(mu / pi) + (1 - mu) ln((1 - mu) / (1 - pi))``, the KL of "this token or another"; any shape."""
    mu, other_mu, other_pi = old_logps.exp(), -torch.expm1(old_logps), -torch.expm1(logps)
    # The term is 0 if mu is 1, even if pi is 1.
    others = torch.xlogy(other_mu, other_mu) - torch.xlogy(other_mu, other_pi)
    return mu * (old_logps - logps) + others


@torch.no_grad()
def inside_region(
    shift: Tensor, logps: Tensor, old_logps: Tensor, advantages: Tensor, limit_low: float, limit_high: float
) -> Tensor:
    """Return a mask, False for tokens that moved beyond their limit in the direction of their advantage; any shape."""
    too_high = (advantages > 0) & (logps > old_logps) & (shift > limit_high)
    too_low = (advantages < 0) & (logps < old_logps) & (shift > limit_low)
    return ~(too_high | too_low)


class DPPO(PolicyLoss):
    """Base class of both variants of DPPO.

    Args:
        limit_low: largest decrease of the probability of a token with a negative advantage.
        limit_high: largest increase of the probability of a token with a positive advantage.
        max_ratio: upper bound of the importance weight.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    def __init__(self, limit_low: float, limit_high: float, max_ratio: float = 20.0, **mean: Any) -> None:
        super().__init__(**mean)
        self.limit_low, self.limit_high, self.max_ratio = limit_low, limit_high, max_ratio

    @abstractmethod
    def shift(self, logps: Tensor, old_logps: Tensor) -> Tensor:
        """Return the change of each token's probability, without gradient."""

    def keep(self, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
        """Return a mask of the tokens to keep: :func:`inside_region` with this loss's limits."""
        shift = self.shift(logps, old_logps)
        return inside_region(shift, logps, old_logps, advantages, self.limit_low, self.limit_high)

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        keep = self.keep(logps_BA, old_logps_BA, advantages_BA)
        return dppo_loss(logps_BA, old_logps_BA, advantages_BA, keep, self.max_ratio)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Return 1 for tokens that are masked, as ``clip_fraction``."""
        return {"clip_fraction": 1.0 - self.keep(logps_BA, old_logps_BA, advantages_BA).float()}


class DPPOTV(DPPO):
    """DPPO by total variation: mask a token once its probability has changed by more than a limit.

    Args:
        limit_low: largest decrease of the probability of a token with a negative advantage.
        limit_high: largest increase of the probability of a token with a positive advantage.
        max_ratio: upper bound of the importance weight.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    def __init__(self, limit_low: float = 0.15, limit_high: float = 0.15, max_ratio: float = 20.0, **mean: Any) -> None:
        super().__init__(limit_low, limit_high, max_ratio, **mean)

    def shift(self, logps: Tensor, old_logps: Tensor) -> Tensor:
        return tv_shift(logps, old_logps)


class DPPOKL(DPPO):
    """DPPO by KL: mask a token once the KL of its probability exceeds a limit in nats.

    Args:
        limit_low: largest KL for a token with a negative advantage whose probability has decreased.
        limit_high: largest KL for a token with a positive advantage whose probability has increased.
        max_ratio: upper bound of the importance weight.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    def __init__(self, limit_low: float = 0.05, limit_high: float = 0.05, max_ratio: float = 20.0, **mean: Any) -> None:
        super().__init__(limit_low, limit_high, max_ratio, **mean)

    def shift(self, logps: Tensor, old_logps: Tensor) -> Tensor:
        return kl_shift(logps, old_logps)
