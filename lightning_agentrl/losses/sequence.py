"""Losses with the ratio of a whole row: GSPO and GMPO.

A row is a sample: one turn with a windowed memory, the whole episode with `FullMemory`. Rows are never split over
micro-batches, but turns of one episode may be in different mini-batches, so an episode in several rows has no ratio.
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

    The ratio of a row is ``s = exp(mean over its tokens of logps - old_logps)``; each token has this value and the
    gradient of its own log-prob, ``sg(s) * exp(logps - sg(logps))``, clipped as in PPO without a dual clip.

    Args:
        logps_BT: log-probs under the current policy.
        old_logps_BT: at the start of the update.
        advantages_BT: constants.
        mask_BT: tokens that count, also in the mean.
        clip_low: how far the row's ratio may fall below 1.
        clip_high: how far it may rise above 1.

    Returns:
        [B, T]; undefined off the mask.
    """
    ratio_BT = _row_ratio(logps_BT, old_logps_BT, mask_BT) * (logps_BT - logps_BT.detach()).exp()
    return clipped_surrogate(ratio_BT, advantages_BT, clip_low, clip_high)


def gmpo_loss(
    logps_BT: Tensor, old_logps_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, clip: float = 0.4
) -> Tensor:
    """Return GMPO, the geometric mean of clipped ratios (arXiv 2507.20673).

    Per row ``-mean(A) * exp(mean over its tokens of s * min(s l, s clip(l, -clip, clip)))`` with the log-ratio ``l``
    and the sign ``s`` of the token's advantage; every token of the row has the loss of the row.

    Args:
        logps_BT: log-probs under the current policy.
        old_logps_BT: at the start of the update.
        advantages_BT: constants.
        mask_BT: tokens that count, also in the means.
        clip: bound of the log-ratio of a token.

    Returns:
        [B, T]; undefined off the mask.
    """
    log_BT, sign_BT = log_ratio(logps_BT, old_logps_BT), advantages_BT.sign()
    clipped_BT = sign_BT * torch.minimum(sign_BT * log_BT, sign_BT * log_BT.clamp(-clip, clip))
    loss_B1 = -row_mean(advantages_BT, mask_BT) * row_mean(clipped_BT, mask_BT).exp()
    return loss_B1.expand_as(logps_BT)


def _row_ratio(logps_BT: Tensor, old_logps_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the geometric mean [B, 1] of the ratios of a row's tokens, a constant."""
    return row_mean(log_ratio(logps_BT.detach(), old_logps_BT), mask_BT).exp()


class GSPO(PolicyLoss):
    """PPO on the ratio of whole rows, for rewards per row.

    Args:
        clip_low: how far the row's ratio may fall below 1.
        clip_high: how far it may rise above 1.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
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
        """Mark tokens whose row has its ratio beyond the bounds."""
        ratio_B1 = _row_ratio(logps_BA, old_logps_BA, mask_BA)
        return {"clip_fraction": outside_clip(ratio_B1, advantages_BA, self.clip_low, self.clip_high).float()}


class GMPO(PolicyLoss):
    """Geometric mean of the clipped ratios of a row, robust to single extreme tokens.

    Args:
        clip: bound of the log-ratio of a token.
        mean: how the loss is averaged, see :class:`PolicyLoss`.
    """

    aggregation: AggregationMode = "seq-mean-token-mean"  # of equal tokens: the mean over rows

    def __init__(self, clip: float = 0.4, **mean: Any) -> None:
        super().__init__(**mean)
        self.clip = clip

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return gmpo_loss(logps_BA, old_logps_BA, advantages_BA, mask_BA, self.clip)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Mark tokens whose log-ratio is beyond the bound in the direction of the advantage."""
        pulled = log_ratio(logps_BA.detach(), old_logps_BA) * advantages_BA.sign()
        return {"clip_fraction": (pulled > self.clip).float()}
