"""Scores relative to the mean of their group: MaxRL."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from lightning_agentrl.advantages.base import check_positive
from lightning_agentrl.advantages.episodes import Episodes, GroupOfOne, ScoreEstimator
from lightning_agentrl.advantages.groups import Groups
from lightning_agentrl.advantages.grpo import centred
from lightning_agentrl.types.ranks import Reduce


def maxrl_advantages(scores_N: Tensor, groups: Groups, eps: float = 1e-6) -> Tensor:
    """Return ``(s - mean) / (mean + eps)`` of the group [N], 0 in groups with equal scores.

    Raises:
        ValueError: a score is negative, so the mean is not a measure of success.
    """
    if (scores_N < -groups.rounding_N).any():
        raise ValueError(
            f"MaxRL needs scores of at least 0, got {float(scores_N.min()):g}; set "
            "data.init_args.interaction.init_args.invalid_penalty and model.init_args.kl.reward to 0, or change "
            "model.init_args.advantage"
        )
    scores_N = scores_N.clamp_min(0)  # rewards that add up to 0 may miss it by their rounding
    return centred(scores_N, groups) / (groups.mean(scores_N) + eps)


class MaxRL(ScoreEstimator):
    """Score minus the mean of its group, relative to that mean, so hard start states count more; for rewards
    that are never negative (arXiv 2602.02710).

    Args:
        eps: added to the mean.
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    needs_nonnegative_scores: ClassVar[bool] = True

    def __init__(self, eps: float = 1e-6, whiten: bool = False, group_of_one: GroupOfOne = "zero") -> None:
        super().__init__(whiten, group_of_one)
        check_positive(self, eps=eps)
        self.eps = eps

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return maxrl_advantages(episodes.scores_N, episodes.groups, self.eps)
