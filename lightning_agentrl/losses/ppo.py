"""PPO: policy loss with clipped ratios, and value loss with clipped values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss, log_ratio, same_shape_float32


def ppo_clip_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """Return PPO's clipped loss (arXiv 1707.06347) with a bound for negative advantages (dual clip, arXiv 1912.09729).

    With ``rho = exp(logps - old_logps)``, the log-ratio clamped to [-20, 20], the loss is
    ``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))``, and at most ``-A dual_clip`` if A < 0.

    Args:
        logps: log-probs under the current policy, any shape.
        old_logps: log-probs at the start of the update, same shape; constants.
        advantages: advantages, same shape; constants.
        clip_low: distance of the lower clip bound of the ratio from 1.
        clip_high: distance of the upper clip bound of the ratio from 1.
        dual_clip: bound of the loss for negative advantages, in multiples of the advantage; None: no bound.

    Returns:
        Loss per token of the same shape, float32 or better. There is no mask, so inputs must be finite everywhere:
        non-finite inputs make gradients NaN even where the loss is multiplied by 0. :class:`PPOClip` handles masks.

    Raises:
        ValueError: shapes differ.
    """
    ratio, advantages = _ratio(logps, old_logps, advantages)
    loss = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return ``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))``, any shape."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))


def outside_clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return a bool mask of the tokens at which :func:`clipped_surrogate` has no gradient."""
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


@torch.no_grad()
def clip_fractions(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return masks of the tokens at which :func:`ppo_clip_loss` has no gradient: by the ratio clip, by the dual clip.

    Arguments are as in :func:`ppo_clip_loss`. The masks have the shape of the arguments and do not overlap.
    """
    ratio, advantages = _ratio(logps, old_logps, advantages)
    clipped = outside_clip(ratio, advantages, clip_low, clip_high)
    if dual_clip is None:
        return clipped, torch.zeros_like(clipped)
    return clipped, (advantages < 0) & (ratio > dual_clip)


def check_clip(name: str, clip_low: float, clip_high: float) -> None:
    """Raise a ValueError unless [1 - clip_low, 1 + clip_high] is a valid range of ratios."""
    if not 0 < clip_low <= 1 or not clip_high > 0:
        raise ValueError(f"{name}: needs 0 < clip_low <= 1 and clip_high > 0, got {clip_low} and {clip_high}")


def _ratio(logps: Tensor, old_logps: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    logps, old_logps, advantages = same_shape_float32(logps=logps, old_logps=old_logps, advantages=advantages)
    return log_ratio(logps, old_logps).exp(), advantages.detach()


class PPOClip(PolicyLoss):
    """PPO's loss with an asymmetric clip and a dual clip.

    Args:
        clip_low: distance of the lower clip bound of the ratio from 1.
        clip_high: distance of the upper clip bound of the ratio from 1.
        dual_clip: bound of the loss for negative advantages, in multiples of the advantage; None: no bound.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    def __init__(
        self, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0, **mean: Any
    ) -> None:
        super().__init__(**mean)
        check_clip(type(self).__name__, clip_low, clip_high)
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(f"{type(self).__name__}: dual_clip must be above 1, got {dual_clip}")
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return ppo_clip_loss(
            logps_BA,
            old_logps_BA,
            advantages_BA,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Return 1 for tokens without a gradient, separately for the ratio clip and the dual clip."""
        clipped, dual_clipped = self.clipped(logps_BA, old_logps_BA, advantages_BA)
        metrics = {"clip_fraction": clipped.float()}
        if self.dual_clip is not None:
            metrics["dual_clip_fraction"] = dual_clipped.float()
        return metrics

    def clipped(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return :func:`clip_fractions` with this loss's bounds."""
        return clip_fractions(logps_BA, old_logps_BA, advantages_BA, self.clip_low, self.clip_high, self.dual_clip)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = 0.5) -> Tensor:
    """Return ``0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)``, the value loss of OpenAI's PPO code.

    Args:
        values: values of the current critic, any shape.
        old_values: values at the start of the update, same shape; constants.
        returns: targets, same shape; constants.
        clip: c, half-width of the range around the old value beyond which the loss has no gradient; None: no clip.

    Returns:
        Loss per token of the same shape, float32 or better, including the factor 0.5.

    Raises:
        ValueError: shapes differ.
    """
    values, old_values, returns = same_shape_float32(values=values, old_values=old_values, returns=returns)
    old_values, returns = old_values.detach(), returns.detach()
    loss = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss
