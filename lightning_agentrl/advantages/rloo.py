"""Leave-one-out baseline: RLOO."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.episodes import Episodes, ScoreEstimator
from lightning_agentrl.advantages.groups import Groups
from lightning_agentrl.types.ranks import Reduce


def minus_others(scores_N: Tensor, groups: Groups) -> Tensor:
    """Return ``s - mean of the others`` of the group [N], 0 in groups with equal scores and groups of one."""
    return torch.where(groups.equal(scores_N), 0, scores_N - groups.others(scores_N))


class RLOO(ScoreEstimator):
    """Score minus the mean score of the others of its group, an unbiased baseline (arXiv 2402.14740).

    Args:
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return minus_others(episodes.scores_N, episodes.groups)
