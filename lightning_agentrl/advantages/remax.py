"""ReMax: the score of a greedy episode as baseline."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import AdvantageEstimator, token_rewards
from lightning_agentrl.advantages.layout import backward_sum, compress, result_dtype
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce


@torch.no_grad()
def minus_greedy(
    rewards_BT: Tensor, mask_BT: Tensor, turn_ids_BT: Tensor, episode_B: Tensor, greedy_scores_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the undiscounted reward to go minus the score of the greedy episode.

    Args:
        rewards_BT: reward of each token.
        mask_BT: action mask.
        turn_ids_BT: id of each token's turn, non-decreasing along a row.
        episode_B: episode label of each row; rows with equal labels are one episode.
        greedy_scores_B: sum of rewards of the greedy episode from the same start state; equal for all rows of an
            episode.

    Returns:
        Advantages and rewards to go [B, T] in float32 or better, 0 off the mask.

    Raises:
        ValueError: shapes do not fit, or rows of one episode differ in their baseline.
    """
    layout = compress(mask_BT, turn_ids_BT, episode_B)
    baseline_N = layout.of_episode("greedy score", greedy_scores_B.double())
    to_go_NL = backward_sum(layout.gather(rewards_BT.double()))
    dtype = result_dtype(rewards_BT)
    return layout.scatter((to_go_NL - baseline_N[:, None]).to(dtype)), layout.scatter(to_go_NL.to(dtype))


class ReMax(AdvantageEstimator):
    """Reward to go minus the score of the greedy episode from the same start state (arXiv 2310.10505).

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
    """

    needs_greedy_baseline: ClassVar[bool] = True

    def __init__(self, whiten: bool = False) -> None:
        super().__init__(whiten)

    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        self.check(rollout)
        assert rollout.greedy_scores is not None
        return minus_greedy(
            token_rewards(rollout), rollout.action_mask, rollout.turn_ids, rollout.episode, rollout.greedy_scores
        )
