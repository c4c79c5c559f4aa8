"""Policy losses per action token."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


def ppo_clip_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """PPO's clipped loss (arXiv 1707.06347) with a bound for negative advantages (dual clip, arXiv 1912.09729).

    All tensors have one shape; the loss has it too. The log-ratio is clamped to [-20, 20].
    """
    ratio = (logps - old_logps).clamp(-20.0, 20.0).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss


class PolicyLoss(ABC):
    """Strategy object: log-probs and advantages -> loss per action token."""

    @abstractmethod
    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
        """Loss in the shape of the arguments."""

    def metrics(self, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Per-token numbers to log, as their means over action tokens."""
        return {}


class PPOClip(PolicyLoss):
    """PPO with asymmetric clip and dual clip.

    Args:
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.
        dual_clip: bound of the loss for negative advantages, in multiples of the advantage; None: no bound.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0) -> None:
        if not 0 < clip_low <= 1 or clip_high <= 0:
            raise ValueError(f"PPOClip: needs 0 < clip_low <= 1 and clip_high > 0, got {clip_low} and {clip_high}")
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(f"PPOClip: dual_clip must be above 1, got {dual_clip}")
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip

    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> Tensor:
        return ppo_clip_loss(
            logps,
            old_logps,
            advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def metrics(self, logps: Tensor, old_logps: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """Where a clip took the gradient away: by the ratio's bounds, and by the dual clip."""
        ratio = (logps - old_logps).clamp(-20.0, 20.0).exp()
        outside = torch.where(advantages > 0, ratio > 1 + self.clip_high, ratio < 1 - self.clip_low)
        metrics = {"clip_fraction": (outside & (advantages != 0)).float()}
        if self.dual_clip is not None:
            metrics["dual_clip_fraction"] = ((advantages < 0) & (ratio > self.dual_clip)).float()
        return metrics
