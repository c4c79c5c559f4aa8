"""Scores relative to their group: GRPO and Dr. GRPO."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import check_positive
from lightning_agentrl.advantages.episodes import Episodes, GroupOfOne, ScoreEstimator
from lightning_agentrl.advantages.groups import Groups
from lightning_agentrl.types.ranks import Reduce


def centred(scores_N: Tensor, groups: Groups) -> Tensor:
    """Return ``s - mean of the group`` [N], exactly 0 in groups with equal scores (Dr. GRPO, arXiv 2503.20783)."""
    return torch.where(groups.equal(scores_N), 0, scores_N - groups.mean(scores_N))


def standardised(scores_N: Tensor, groups: Groups, eps: float = 1e-6) -> Tensor:
    """Return ``(s - mean) / (std + eps)`` of the group [N], exactly 0 in groups with equal scores (GRPO, arXiv
    2402.03300).

    The standard deviation is that of a sample (n - 1).
    """
    return centred(scores_N, groups) / (groups.std(scores_N) + eps)


class GRPO(ScoreEstimator):
    """Score minus the mean of its group, divided by the group's standard deviation (arXiv 2402.03300).

    Args:
        eps: added to the standard deviation.
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    divide_by_std = True

    def __init__(self, eps: float = 1e-6, whiten: bool = False, group_of_one: GroupOfOne = "zero") -> None:
        super().__init__(whiten, group_of_one)
        check_positive(self, eps=eps)
        self.eps = eps

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return standardised(episodes.scores_N, episodes.groups, self.eps)


class DrGRPO(ScoreEstimator):
    """Score minus the mean of its group (arXiv 2503.20783); meant for a loss with a constant divisor.

    Args:
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return centred(episodes.scores_N, episodes.groups)
