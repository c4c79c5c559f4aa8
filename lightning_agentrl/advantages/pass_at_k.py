"""Only the best episode of a group counts: Pass@k."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import check_positive
from lightning_agentrl.advantages.episodes import Episodes, GroupOfOne, ScoreEstimator
from lightning_agentrl.advantages.groups import Groups
from lightning_agentrl.types.ranks import Reduce


def best_minus_second(scores_N: Tensor, groups: Groups) -> Tensor:
    """Return the lead [N] of the best episode of each group over the second, 0 for the others; with a tie all are 0."""
    best_N = scores_N == groups.max(scores_N)
    tie_N = groups.sum(best_N.to(scores_N.dtype)) > 1
    second_N = groups.max(torch.where(best_N, -torch.inf, scores_N))
    return torch.where(best_N & ~tie_N & ~groups.equal(scores_N), scores_N - second_N, 0)


class PassAtK(ScoreEstimator):
    """The lead of the best episode of a group over the second, and 0 for all others: raises the chance that one of k
    episodes succeeds, not the chance of each (arXiv 2503.19595).

    Args:
        divide_by_std: divide the lead by the group's standard deviation, as GRPO does.
        eps: added to the standard deviation.
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    def __init__(
        self,
        divide_by_std: bool = True,
        eps: float = 1e-6,
        whiten: bool = False,
        group_of_one: GroupOfOne = "zero",
    ) -> None:
        super().__init__(whiten, group_of_one)
        check_positive(self, eps=eps)
        self.divide_by_std, self.eps = divide_by_std, eps

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        lead_N = best_minus_second(episodes.scores_N, episodes.groups)
        return lead_N / (episodes.groups.std(episodes.scores_N) + self.eps) if self.divide_by_std else lead_N
