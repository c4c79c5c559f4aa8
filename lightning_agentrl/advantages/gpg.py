"""Group policy gradient: centred scores, rescaled for the groups that teach nothing."""

from __future__ import annotations

from torch import Tensor

from lightning_agentrl.advantages.episodes import Episodes, ScoreEstimator
from lightning_agentrl.advantages.groups import Groups
from lightning_agentrl.advantages.grpo import centred
from lightning_agentrl.advantages.whitening import Reduce


def gpg_advantages(scores_N: Tensor, groups: Groups, reduce: Reduce | None = None) -> Tensor:
    """``alpha (s - mean of the group)`` [N], with alpha all episodes over those in groups of unequal scores.

    Args:
        scores_N: float64, one score per episode.
        groups: of the episodes.
        reduce: sums a small float64 tensor over ranks, since alpha is that of all of them; called once. None: there is
            one rank.
    """
    counts = scores_N.new_tensor([len(scores_N), float((~groups.equal(scores_N)).sum())])
    total, unequal = (counts if reduce is None else reduce(counts)).tolist()
    return centred(scores_N, groups) * (total / max(unequal, 1.0))


class GPG(ScoreEstimator):
    """Score minus the mean of its group, larger by as much as groups with equal scores make the gradient smaller
    (arXiv 2504.02546, without a division by the standard deviation).

    Args:
        whiten: see :class:`AdvantageEstimator`.
        group_of_one: see :class:`GroupEstimator`.
    """

    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        return gpg_advantages(episodes.scores_N, episodes.groups, reduce)
