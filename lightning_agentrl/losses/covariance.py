"""Clip-Cov and KL-Cov: restrict the update of a few tokens with a high covariance of log-prob and advantage.

These tokens reduce the entropy most, and are chosen from the mini-batches of all ranks.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import PolicyLoss, check_share, count_of, counted, log_ratio
from lightning_agentrl.losses.ppo import PPOClip
from lightning_agentrl.types.rollout import Gather, alone


@torch.no_grad()
def covariances(logps_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, gather: Gather = alone) -> tuple[Tensor, int]:
    """Return ``(A - mean A)(logps - mean logps)`` per token, with means over all ranks, and the number of tokens.

    Covariances are float64, 0 off the mask (arXiv 2505.22617).
    """
    mask = mask_BT.bool()
    x_M2 = torch.stack([advantages_BT[mask], logps_BT[mask]], 1).double()
    sums = gather(torch.cat([x_M2.new_tensor([len(x_M2)]), x_M2.sum(0)]))
    count, *totals = torch.stack([part.cpu() for part in sums]).sum(0).tolist()
    deviations = x_M2 - x_M2.new_tensor(totals) / max(count, 1.0)
    cov_BT = torch.zeros_like(logps_BT, dtype=torch.float64)
    cov_BT[mask] = deviations.prod(1)
    return cov_BT, int(count)


@torch.no_grad()
def largest(scores_BT: Tensor, noise_BT: Tensor, mask_BT: Tensor, count: int, gather: Gather = alone) -> Tensor:
    """Return a mask [B, T] of the ``count`` largest scores over all ranks, or of all scores if there are fewer.

    Noise breaks ties, so the result does not depend on the order of rows or their distribution over ranks.

    Args:
        scores_BT: scores in float64.
        noise_BT: random numbers that differ between all tokens of all ranks.
        mask_BT: tokens to choose from.
        count: number of tokens to choose.
        gather: function that gathers a tensor from all ranks.
    """
    mask = mask_BT.bool()
    noise_BT = noise_BT.to(scores_BT)
    own = _first(torch.stack([scores_BT[mask], noise_BT[mask]], 1), count)
    every = _first(torch.cat([part.to(own) for part in gather(own)]), count)
    if not len(every):
        return torch.zeros_like(mask)
    score, noise = every[-1]
    return mask & ((scores_BT > score) | ((scores_BT == score) & (noise_BT >= noise)))


def _first(keys_M2: Tensor, count: int) -> Tensor:
    """Return the first ``count`` rows in descending order of the first column, then of the second."""
    keys_M2 = keys_M2[keys_M2[:, 1].argsort(descending=True, stable=True)]
    return keys_M2[keys_M2[:, 0].argsort(descending=True, stable=True)][:count]


class ClipCov(PPOClip):
    """PPO that leaves out a random sample of the tokens with a high covariance (Clip-Cov).

    Args:
        share: fraction of the tokens of a mini-batch to leave out; at least one token.
        cov_low: covariance above which a token can be chosen.
        cov_high: covariance below which a token can be chosen.
        clip_low: distance of the lower clip bound of the ratio from 1.
        clip_high: distance of the upper clip bound of the ratio from 1.
        dual_clip: bound of the loss for negative advantages, in multiples of the advantage; None: no bound.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    needs_mini_batch_logps: ClassVar[bool] = True

    def __init__(
        self,
        share: float = 2e-4,
        cov_low: float = 1.0,
        cov_high: float = 5.0,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = 3.0,
        **mean: Any,
    ) -> None:
        super().__init__(clip_low, clip_high, dual_clip, **mean)
        check_share("ClipCov", share)
        self.share, self.cov_low, self.cov_high = share, cov_low, cov_high

    def pick(
        self,
        logps_BA: Tensor,
        old_logps_BA: Tensor,
        advantages_BA: Tensor,
        mask_BA: Tensor,
        noise_BA: Tensor,
        gather: Gather = alone,
    ) -> Tensor:
        """Pick random tokens among those whose covariance is within the bounds and that PPO does not clip."""
        logps, old_logps, advantages, mask = counted(logps_BA, old_logps_BA, advantages_BA, mask_BA)
        cov, tokens = covariances(logps, advantages, mask, gather)
        clipped, dual_clipped = self.clipped(logps, old_logps, advantages)
        candidates = mask & (cov > self.cov_low) & (cov < self.cov_high) & ~clipped & ~dual_clipped
        return largest(torch.zeros_like(cov), noise_BA, candidates, count_of(self.share, tokens), gather)

    def __call__(
        self,
        logps_BA: Tensor,
        old_logps_BA: Tensor,
        advantages_BA: Tensor,
        mask_BA: Tensor,
        picked_BA: Tensor | None = None,
    ) -> Tensor:
        """Return PPO's loss, 0 at the picked tokens, which still count in denominators."""
        assert picked_BA is not None
        return torch.where(picked_BA.bool(), 0, super().__call__(logps_BA, old_logps_BA, advantages_BA, mask_BA))


class KLCov(PolicyLoss):
    """Unclipped ratios with a penalty on the change of the tokens with the highest covariance (KL-Cov).

    Use it with several optimizer steps per rollout: in the first step the policy has not changed, so the penalty is on
    rounding errors only.

    Args:
        share: fraction of the tokens of a mini-batch to penalize; at least one token.
        penalty: weight of the penalty on a picked token, the absolute value of its log-ratio.
        mean: arguments of :class:`PolicyLoss`, which set how the loss is averaged.
    """

    needs_mini_batch_logps: ClassVar[bool] = True

    def __init__(self, share: float = 2e-4, penalty: float = 1.0, **mean: Any) -> None:
        super().__init__(**mean)
        check_share("KLCov", share)
        self.share, self.penalty = share, penalty

    def pick(
        self,
        logps_BA: Tensor,
        old_logps_BA: Tensor,
        advantages_BA: Tensor,
        mask_BA: Tensor,
        noise_BA: Tensor,
        gather: Gather = alone,
    ) -> Tensor:
        """Pick the tokens with the highest covariance."""
        logps, _, advantages, mask = counted(logps_BA, old_logps_BA, advantages_BA, mask_BA)
        cov, tokens = covariances(logps, advantages, mask, gather)
        return largest(cov, noise_BA, mask, count_of(self.share, tokens), gather)

    def __call__(
        self,
        logps_BA: Tensor,
        old_logps_BA: Tensor,
        advantages_BA: Tensor,
        mask_BA: Tensor,
        picked_BA: Tensor | None = None,
    ) -> Tensor:
        """Return ``-A rho``, plus ``penalty * |logps - old_logps|`` at the picked tokens."""
        assert picked_BA is not None
        logps, old_logps, advantages, mask = counted(logps_BA, old_logps_BA, advantages_BA, mask_BA)
        pull = self.penalty * log_ratio(logps, old_logps).abs()
        return torch.where(
            mask, self.token_loss(logps, old_logps, advantages, mask) + torch.where(picked_BA.bool(), pull, 0), 0
        )

    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return -advantages_BA * log_ratio(logps_BA, old_logps_BA).exp()
