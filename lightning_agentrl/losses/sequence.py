"""Losses with one ratio per row: GSPO and GMPO.

A row is a sample: one turn with a windowed memory, the whole episode with `FullMemory`. Rows are never split over
micro-batches. An episode of several rows has no common ratio, since its rows may be in different mini-batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.losses.aggregation import AggregationMode
from lightning_agentrl.losses.policy import PolicyLoss, log_ratio, row_mean
from lightning_agentrl.losses.ppo import check_clip, clipped_surrogate, outside_clip


def gspo_loss(
    logps_BT: Tensor,
    old_logps_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Return the token-level form of GSPO (arXiv 2507.18071).

    The ratio of a row is ``s = exp(mean over its tokens of logps - old_logps)``. Each token's ratio has this value and
    the gradient of its own log-prob, ``sg(s) * exp(logps - sg(logps))``, and is clipped as in PPO without a dual clip.

    Args:
        logps_BT: log-probs under the current policy.
        old_logps_BT: log-probs at the start of the update.
        advantages_BT: advantages; constants.
        mask_BT: tokens that count, also in the mean.
        clip_low: distance of the lower clip bound of the row's ratio from 1.
        clip_high: distance of the upper clip bound of the row's ratio from 1.

    Returns:
        Loss per token [B, T]; undefined off the mask.
    """
    ratio_BT = _row_ratio(logps_BT, old_logps_BT, mask_BT) * (logps_BT - logps_BT.detach()).exp()
    return clipped_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)


def gmpo_loss(
    logps_BT: Tensor, old_logps_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, clip: float = 0.4
) -> Tensor:
    """Return GMPO, the geometric mean of clipped ratios (arXiv 2507.20673).

    The loss of a row is ``-mean(A) * exp(mean over its tokens of s * min(s l, s clip(l, -clip, clip)))`` with the
    log-ratio ``l`` and the sign ``s`` of a token's advantage; every token of the row has this loss.

    Args:
        logps_BT: log-probs under the current policy.
        old_logps_BT: log-probs at the start of the update.
        advantages_BT: advantages; constants.
        mask_BT: tokens that count, also in the means.
        clip: bound of the log-ratio of a token.

    Returns:
        Loss per token [B, T]; undefined off the mask.
    """
    log_BT, sign_BT = log_ratio(logps_BT, old_logps_BT), advantages_BT.sign()
    clipped_BT = sign_BT * torch.minimum(sign_BT * log_BT, sign_BT * log_BT.clamp(-clip, clip))
    loss_B1 = -row_mean(advantages_BT, mask_BT) * row_mean(clipped_BT, mask_BT).exp()
    return loss_B1.expand_as(logps_BT)


def _row_ratio(logps_BT: Tensor, old_logps_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the geometric mean [B, 1] of the ratios of each row's tokens, without gradient."""
    return row_mean(log_ratio(logps_BT.detach(), old_logps_BT), mask_BT).exp()


class GSPO(PolicyLoss):
    """PPO with one ratio per row, the geometric mean over its tokens, for rewards per row.

    Args:
        clip_low: distance of the lower clip bound of the row's ratio from 1.
        clip_high: distance of the upper clip bound of the row's ratio from 1.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    aggregation: AggregationMode = "seq-mean-token-mean"

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4, **mean: Any) -> None:
        super().__init__(**mean)
        check_clip("GSPO", clip_low, clip_high)
        self.clip_low, self.clip_high = clip_low, clip_high

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return gspo_loss(logps_BA, old_logps_BA, advantages_BA, mask_BA, self.clip_low, self.clip_high)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Return 1 for the tokens of rows whose ratio is clipped, as ``clip_fraction``."""
        ratio_B1 = _row_ratio(logps_BA, old_logps_BA, mask_BA)
        return {"clip_fraction": outside_clip(ratio_B1, advantages_BA, self.clip_low, self.clip_high).float()}


class GMPO(PolicyLoss):
    """Policy gradient with the geometric mean of a row's clipped ratios, robust to single extreme tokens.

    Args:
        clip: bound of the log-ratio of a token.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    aggregation: AggregationMode = "seq-mean-token-mean"  # mean over rows; all tokens of a row have equal losses

    def __init__(self, clip: float = 0.4, **mean: Any) -> None:
        super().__init__(**mean)
        self.clip = clip

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return gmpo_loss(logps_BA, old_logps_BA, advantages_BA, mask_BA, self.clip)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Return 1 for tokens whose log-ratio is clipped in the direction of the advantage, as ``clip_fraction``."""
        pulled = log_ratio(logps_BA.detach(), old_logps_BA) * advantages_BA.sign()
        return {"clip_fraction": (pulled > self.clip).float()}
