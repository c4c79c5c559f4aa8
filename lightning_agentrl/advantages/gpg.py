"""Group policy gradient: centred scores, rescaled to make up for groups without a signal."""

from __future__ import annotations

from torch import Tensor

from lightning_agentrl.advantages.episodes import Episodes, ScoreEstimator
from lightning_agentrl.advantages.groups import Groups
from lightning_agentrl.advantages.grpo import centred
from lightning_agentrl.types.ranks import Reduce


def gpg_advantages(scores_N: Tensor, groups: Groups, reduce: Reduce | None = None) -> Tensor:
    """Return ``alpha (s - mean of the group)`` [N], with alpha the number of all episodes over that of episodes in
    groups with unequal scores.

    Args:
        scores_N: float64, one score per episode.
        groups: of the episodes.
        reduce: sums a small float64 tensor over ranks, since alpha is global; called once. None: there is only one
            rank.
    """
    counts = scores_N.new_tensor([len(scores_N), float((~groups.equal(scores_N)).sum())])
    total, unequal = (counts if reduce is None else reduce(counts)).tolist()
    return centred(scores_N, groups) * (total / max(unequal, 1.0))


class GPG(ScoreEstimator):
    """Score minus the mean of its group, scaled up by as much as groups with equal scores shrink the gradient
    (arXiv 2504.02546, without a division by the standard deviation).

    Args:
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return gpg_advantages(episodes.scores_N, episodes.groups, reduce)
