"""REINFORCE++ and its variant with a baseline: REINFORCE with whitened returns."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import AdvantageEstimator, check_fractions, token_rewards
from lightning_agentrl.advantages.episodes import GroupOfOne
from lightning_agentrl.advantages.grpo import DrGRPO
from lightning_agentrl.advantages.layout import backward_sum, compress, result_dtype
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce


@torch.no_grad()
def rewards_to_go(
    rewards_BT: Tensor, mask_BT: Tensor, turn_ids_BT: Tensor, episode_B: Tensor, gamma: float = 1.0
) -> Tensor:
    """Return ``G_k = r_k + gamma G_{k+1}`` over the action tokens of each episode; other tokens are skipped.

    Args:
        rewards_BT: reward of each token.
        mask_BT: action mask.
        turn_ids_BT: id of each token's turn, non-decreasing along a row.
        episode_B: episode label of each row; rows with equal labels are one episode.
        gamma: discount from action token to action token, also across turns.

    Returns:
        [B, T] in float32 or better, 0 off the mask.
    """
    layout = compress(mask_BT, turn_ids_BT, episode_B)
    return layout.scatter(backward_sum(layout.gather(rewards_BT.double()), gamma).to(result_dtype(rewards_BT)))


class ReinforcePlusPlus(AdvantageEstimator):
    """Rewards to go, whitened over all tokens of all ranks (arXiv 2501.03262); needs neither critic nor groups.

    Rewards to go lack the rewards after the end of the rollout, so episodes should end within a rollout.

    Args:
        gamma: discount from action token to action token.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
    """

    def __init__(self, gamma: float = 1.0, whiten: bool = True) -> None:
        super().__init__(whiten)
        check_fractions(self, gamma=gamma)
        self.gamma = self.turn_discount = self.token_discount = gamma

    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        rewards = token_rewards(rollout)
        returns = rewards_to_go(rewards, rollout.action_mask, rollout.turn_ids, rollout.episode, self.gamma)
        return returns, returns


class ReinforcePlusPlusBaseline(DrGRPO):
    """Score minus the mean of its group, whitened over all tokens of all ranks (arXiv 2501.03262).

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    def __init__(self, whiten: bool = True, group_of_one: GroupOfOne = "zero") -> None:
        super().__init__(whiten, group_of_one)
