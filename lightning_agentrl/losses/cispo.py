"""CISPO: REINFORCE with clipped importance weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss
from lightning_agentrl.losses.precision import log_ratio


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
    """REINFORCE with clipped importance weights: gradients are not clipped, so rare tokens keep learning.

    Args:
        clip_low: how far a weight may fall below 1; no bound if at least 1.
        clip_high: how far it may rise above 1.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
    """

    def __init__(self, clip_low: float = 1.0, clip_high: float = 0.28, **mean: Any) -> None:
        super().__init__(**mean)
        if not clip_low > 0 or not clip_high > 0:
            raise ValueError(f"CISPO: clip_low and clip_high must be above 0, got {clip_low} and {clip_high}")
        self.clip_low, self.clip_high = clip_low, clip_high

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return cispo_loss(logps_BA, old_logps_BA, advantages_BA, self.clip_low, self.clip_high)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Mark tokens whose weight was clipped."""
        ratio = log_ratio(logps_BA.detach(), old_logps_BA).exp()
        return {"clip_fraction": ((ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)).float()}
