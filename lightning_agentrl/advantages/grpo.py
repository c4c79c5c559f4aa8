"""Estimators that compare the score of an episode with its group: GRPO, Dr. GRPO, RLOO, MaxRL, OPO, GPG and Pass@k."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import check_positive
from lightning_agentrl.advantages.episodes import Episodes, GroupOfOne, Groups, ScoreEstimator
from lightning_agentrl.types.rollout import Reduce


def centred(scores_N: Tensor, groups: Groups) -> Tensor:
    """Return ``s - mean of the group`` [N], exactly 0 in groups with equal scores (Dr. GRPO, arXiv 2503.20783)."""
    return torch.where(groups.equal(scores_N), 0, scores_N - groups.mean(scores_N))


def standardised(scores_N: Tensor, groups: Groups, eps: float = 1e-6) -> Tensor:
    """Return ``(s - mean) / (std + eps)`` of the group [N], exactly 0 in groups with equal scores.

    The standard deviation is that of a sample (n - 1). Source: GRPO, arXiv 2402.03300.
    """
    return centred(scores_N, groups) / (groups.std(scores_N) + eps)


class GRPO(ScoreEstimator):
    """Score minus the mean of its group, divided by the group's standard deviation (arXiv 2402.03300).

    Args:
        eps: number added to the standard deviation.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
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
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return centred(episodes.scores_N, episodes.groups)


def minus_others(scores_N: Tensor, groups: Groups) -> Tensor:
    """Return ``s - mean of the other scores`` in the group [N], 0 in groups with equal scores and groups of one."""
    return torch.where(groups.equal(scores_N), 0, scores_N - groups.others(scores_N))


class RLOO(ScoreEstimator):
    """Score minus the mean score of the other episodes of its group, an unbiased baseline (arXiv 2402.14740).

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return minus_others(episodes.scores_N, episodes.groups)


def maxrl_advantages(scores_N: Tensor, groups: Groups, eps: float = 1e-6) -> Tensor:
    """Return ``(s - mean) / (mean + eps)`` of the group [N], 0 in groups with equal scores.

    Raises:
        ValueError: a score is negative, so the mean does not measure success.
    """
    if (scores_N < -groups.rounding_N).any():
        raise ValueError(
            f"MaxRL needs scores of at least 0, got {float(scores_N.min()):g}; set "
            "data.init_args.interaction.init_args.invalid_penalty and model.init_args.kl.reward to 0, or change "
            "model.init_args.advantage"
        )
    scores_N = scores_N.clamp_min(0)  # a sum of 0 can be slightly negative by rounding
    return centred(scores_N, groups) / (groups.mean(scores_N) + eps)


class MaxRL(ScoreEstimator):
    """Score minus the mean of its group, divided by that mean, so hard start states count more (arXiv 2602.02710).

    Scores must not be negative.

    Args:
        eps: number added to the mean.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    needs_nonnegative_scores: ClassVar[bool] = True

    def __init__(self, eps: float = 1e-6, whiten: bool = False, group_of_one: GroupOfOne = "zero") -> None:
        super().__init__(whiten, group_of_one)
        check_positive(self, eps=eps)
        self.eps = eps

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return maxrl_advantages(episodes.scores_N, episodes.groups, self.eps)


def minus_length_weighted(scores_N: Tensor, lengths_N: Tensor, groups: Groups) -> Tensor:
    """Return ``s - sum(K s) / sum(K)`` of the group [N], with K the number of trained tokens; 0 for equal scores."""
    baseline_N = groups.sum(lengths_N * scores_N) / groups.sum(lengths_N)
    return torch.where(groups.equal(scores_N), 0, scores_N - baseline_N)


class OPO(ScoreEstimator):
    """Score minus the length-weighted mean of its group (arXiv 2505.23585).

    This baseline minimizes the variance if the squared norm of an episode's score function is proportional to its
    number of action tokens. Rejected tokens have no gradient and do not count.

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return minus_length_weighted(episodes.scores_N, episodes.trained_NL.sum(1), episodes.groups)


def gpg_advantages(scores_N: Tensor, groups: Groups, reduce: Reduce | None = None) -> Tensor:
    """Return ``alpha (s - mean of the group)`` [N].

    alpha is the number of all episodes divided by the number of episodes in groups with unequal scores.

    Args:
        scores_N: score of each episode, float64.
        groups: groups of the episodes.
        reduce: function that sums a small float64 tensor over ranks, since alpha is global; called once. None means
            that there is only one rank.
    """
    counts = scores_N.new_tensor([len(scores_N), float((~groups.equal(scores_N)).sum())])
    total, unequal = (counts if reduce is None else reduce(counts)).tolist()
    return centred(scores_N, groups) * (total / max(unequal, 1.0))


class GPG(ScoreEstimator):
    """Score minus the mean of its group, scaled up to offset groups with equal scores, which have no gradient.

    Source: arXiv 2504.02546, without division by the standard deviation.

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return gpg_advantages(episodes.scores_N, episodes.groups, reduce)


def best_minus_second(scores_N: Tensor, groups: Groups) -> Tensor:
    """Return the lead [N] of each group's best episode over its second best; 0 for other episodes and for ties."""
    best_N = scores_N == groups.max(scores_N)
    tie_N = groups.sum(best_N.to(scores_N.dtype)) > 1
    second_N = groups.max(torch.where(best_N, -torch.inf, scores_N))
    return torch.where(best_N & ~tie_N & ~groups.equal(scores_N), scores_N - second_N, 0)


class PassAtK(ScoreEstimator):
    """Lead of the best episode of a group over the second best; 0 for all other episodes (arXiv 2503.19595).

    This estimator increases the probability that at least one of k episodes succeeds, not the success probability of
    each episode.

    Args:
        divide_by_std: whether to divide the lead by the group's standard deviation, as in GRPO.
        eps: number added to the standard deviation.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
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
