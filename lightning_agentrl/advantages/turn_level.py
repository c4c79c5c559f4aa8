"""Leave-one-out baseline for turns: rewards to go are compared with other episodes at the same turn."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import check_fractions, token_rewards
from lightning_agentrl.advantages.episodes import GroupEstimator, GroupOfOne, Groups
from lightning_agentrl.advantages.grpo import minus_others
from lightning_agentrl.advantages.layout import backward_sum, result_dtype
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce


def others_at_turn(
    to_go_NJ: Tensor, numbers_NJ: Tensor, mask_NJ: Tensor, labels_N: Tensor, rounding_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each turn's reward to go minus the mean over the other episodes of the group that reached that turn.

    The baseline of a turn does not depend on the actions of its episode in this turn or later, so it does not bias the
    gradient. Subtracting the group mean from the reward of each turn and then summing would bias the gradient: the sum
    of the subtracted means would depend on the number of turns that the episode took.

    Args:
        to_go_NJ: reward to go of each turn.
        numbers_NJ: index of each turn in its episode.
        mask_NJ: turns that exist.
        labels_N: group labels of the episodes.
        rounding_N: largest rounding error of each episode's rewards to go, see :class:`Groups`.

    Returns:
        Differences [N, J], 0 off the mask and at turns that no other episode of the group reached; and a mask [N, J] of
        the turns that no other episode reached.
    """
    differences_NJ, alone_NJ = torch.zeros_like(to_go_NJ), torch.zeros_like(mask_NJ)
    labels_M2 = torch.stack([labels_N[:, None].expand(mask_NJ.shape)[mask_NJ], numbers_NJ[mask_NJ]], 1)
    rounding_M = None if rounding_N is None else rounding_N[:, None].expand(mask_NJ.shape)[mask_NJ]
    reached = Groups(labels_M2, rounding_M)
    differences_NJ[mask_NJ] = minus_others(to_go_NJ[mask_NJ], reached)
    alone_NJ[mask_NJ] = reached.single_N
    return differences_NJ, alone_NJ


class TurnLeaveOneOut(GroupEstimator):
    """Reward to go of a turn minus the mean over the other episodes of the group that reached that turn.

    Returns are the rewards to go of the turns.

    Args:
        gamma: discount from turn to turn.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of a turn that no other episode of its group reached: ``zero``, or ``raw`` for its
            reward to go.
    """

    def __init__(self, gamma: float = 1.0, whiten: bool = False, group_of_one: GroupOfOne = "zero") -> None:
        super().__init__(whiten, group_of_one)
        check_fractions(self, gamma=gamma)
        self.gamma = self.turn_discount = gamma

    @torch.no_grad()
    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        episodes, dtype = self.episodes(rollout), result_dtype(token_rewards(rollout))
        layout, turns = episodes.layout, episodes.layout.turns(rollout.turn_ids)
        numbers_NJ = turns.at_ends(layout.gather(rollout.turn_ids))
        to_go_NJ = backward_sum(turns.sum(episodes.rewards_NL), self.gamma)
        advantages_NJ, alone_NJ = others_at_turn(
            to_go_NJ, numbers_NJ, turns.mask_NJ, episodes.labels_N, episodes.rounding_N
        )
        if self.group_of_one == "raw":
            advantages_NJ = torch.where(alone_NJ, to_go_NJ, advantages_NJ)
        return layout.scatter(turns.spread(advantages_NJ).to(dtype)), layout.scatter(turns.spread(to_go_NJ).to(dtype))
