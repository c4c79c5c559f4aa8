"""GDPO: several rewards, each normalized within its group before they are added."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import check_positive, token_rewards
from lightning_agentrl.advantages.episodes import Episodes, GroupEstimator, GroupOfOne, Groups, turns_of
from lightning_agentrl.advantages.grpo import standardised
from lightning_agentrl.advantages.layout import result_dtype
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce

REWARD = "reward"
KEY = "model.init_args.advantage.init_args.weights"


def gdpo_advantages(
    scores_ND: Tensor, weights_D: Tensor, groups: Groups | Sequence[Groups], eps: float = 1e-6
) -> Tensor:
    """Return ``sum_d w_d (s_d - mean_d) / (std_d + eps)`` [N] over the D dimensions of the reward, before whitening.

    Args:
        scores_ND: score of each episode in each dimension.
        weights_D: weights of the dimensions.
        groups: groups of the episodes; one object per dimension if the rounding errors of the dimensions differ.
        eps: number added to the standard deviations.
    """
    of_dimension = [groups] * len(weights_D) if isinstance(groups, Groups) else groups
    columns = zip(scores_ND.T, weights_D, of_dimension, strict=True)
    return torch.stack([weight * standardised(x_N, each, eps) for x_N, weight, each in columns]).sum(0)


class GDPO(GroupEstimator):
    """GRPO applied to each dimension of the reward, then a weighted sum, whitened (arXiv 2601.05242).

    A dimension with a large variance thus cannot dominate the others. Returns are the weighted sums of the scores.

    Args:
        weights: weight of each dimension by name. A dimension is ``reward`` (the sum of an episode's rewards) or a
            number that the environment reports (its last value in an episode counts), as ``info["progression"]`` or in
            ``info["metrics"]``. None means ``reward`` only.
        eps: number added to the standard deviations.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    divide_by_std = True

    def __init__(
        self,
        weights: dict[str, float] | None = None,
        eps: float = 1e-6,
        whiten: bool = True,
        group_of_one: GroupOfOne = "zero",
    ) -> None:
        super().__init__(whiten, group_of_one)
        check_positive(self, eps=eps)
        self.weights: Mapping[str, float] = {REWARD: 1.0} if weights is None else weights
        if not self.weights:
            raise ValueError(f"GDPO needs at least one dimension of the reward, got none (key {KEY})")
        self.eps = eps

    @torch.no_grad()
    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        episodes, dtype = self.episodes(rollout), result_dtype(token_rewards(rollout))
        scores_ND = self._scores(rollout, episodes)
        weights_D = scores_ND.new_tensor(list(self.weights.values()))
        sums_N = scores_ND @ weights_D
        of_told = Groups(episodes.labels_N)  # reported numbers are not sums, so their rounding errors are small
        groups = [episodes.groups if name == REWARD else of_told for name in self.weights]
        compared_N = gdpo_advantages(scores_ND, weights_D, groups, self.eps)
        advantages_N = self.where_alone(episodes.groups, sums_N, compared_N)
        return episodes.layout.spread(advantages_N.to(dtype)), episodes.layout.spread(sums_N.to(dtype))

    def _scores(self, rollout: Rollout, episodes: Episodes) -> Tensor:
        """Return the score [N, D] of each episode in each dimension of the reward."""
        of_episodes = turns_of(rollout, episodes.layout)
        columns = []
        for name in self.weights:
            if name == REWARD:
                columns.append(episodes.scores_N)
                continue
            scores = []
            for turns in of_episodes:
                told = [turn.metrics[name] for turn in turns if name in turn.metrics]
                if not told:
                    turn = turns[-1]
                    known = ", ".join([REWARD, *turn.metrics])
                    raise ValueError(
                        f"GDPO: episode {turn.episode} of environment {turn.env} reports no '{name}' up to its last "
                        f"turn {turn.index}, only {known}; change {KEY}"
                    )
                scores.append(next((number for number in reversed(told) if math.isfinite(number)), math.nan))
            columns.append(episodes.scores_N.new_tensor(scores))
        return torch.stack(columns, 1)
