"""Length-weighted baseline: OPO."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.episodes import Episodes, ScoreEstimator
from lightning_agentrl.advantages.groups import Groups
from lightning_agentrl.types.ranks import Reduce


def minus_length_weighted(scores_N: Tensor, lengths_N: Tensor, groups: Groups) -> Tensor:
    """Return ``s - sum(K s) / sum(K)`` of the group [N], K the number of trained tokens; 0 for equal scores."""
    baseline_N = groups.sum(lengths_N * scores_N) / groups.sum(lengths_N)
    return torch.where(groups.equal(scores_N), 0, scores_N - baseline_N)


class OPO(ScoreEstimator):
    """Score minus the length-weighted mean of its group, the baseline of least variance if the squared norm of an
    episode's score function grows with its action tokens (arXiv 2505.23585). Rejected tokens have no gradient, and do
    not count.

    Args:
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return minus_length_weighted(episodes.scores_N, episodes.trained_NL.sum(1), episodes.groups)
