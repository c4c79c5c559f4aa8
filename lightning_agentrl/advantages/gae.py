"""Generalised advantage estimation over turns and tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import AdvantageEstimator
from lightning_agentrl.advantages.layout import compress
from lightning_agentrl.types import Rollout


def dual_discount_gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    turn_ids_BT: Tensor,
    trajectory_B: Tensor,
    terminated_B: Tensor,
    bootstrap_values_B: Tensor,
    *,
    gamma_step: float = 0.99,
    lam_step: float = 0.95,
    gamma_token: float = 1.0,
    lam_token: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """GAE whose discounts belong to the transition: one pair inside a turn, one from turn to turn (Verlog).

    For action tokens k of one trajectory, with (g, l) the step pair where token k + 1 is of another turn::

        delta_k = r_k + g V_{k+1} - V_k,   A_k = delta_k + g l A_{k+1},   return_k = A_k + V_k

    Tokens off the mask are no steps. After the last token, V is 0 if the trajectory's last row is terminated, else
    that row's bootstrap value behind the step discount, and no advantage is carried in.

    Args:
        rewards_BT: reward of each token.
        values_BT: value of the state before each token.
        mask_BT: action mask.
        turn_ids_BT: number of the turn of each token.
        trajectory_B: label; rows with the same label are one trajectory.
        terminated_B: whether the episode ended after the row, without a next state.
        bootstrap_values_B: value of the state after the row, used where a trajectory is cut.

    Returns:
        Advantages and returns [B, T] in float32 or better, 0 off the mask.
    """
    dtype = torch.promote_types(torch.promote_types(rewards_BT.dtype, values_BT.dtype), torch.float32)
    layout = compress(mask_BT, turn_ids_BT, trajectory_B)
    rewards, values = layout.gather(rewards_BT.to(dtype)), layout.gather(values_BT.to(dtype))
    turns, mask = layout.gather(turn_ids_BT), layout.mask_NL
    terminated = terminated_B.bool()[layout.last_row_N]
    after_cut = torch.where(terminated, 0.0, bootstrap_values_B.to(dtype)[layout.last_row_N])

    advantages = torch.zeros_like(values)
    next_value, next_advantage = after_cut, torch.zeros_like(after_cut)
    next_turn = torch.full_like(layout.last_row_N, -1)  # another turn: the step pair applies at the cut
    for k in reversed(range(values.shape[1])):
        new_turn = turns[:, k] != next_turn
        gamma = torch.where(new_turn, gamma_step, gamma_token).to(dtype)
        lam = torch.where(new_turn, lam_step, lam_token).to(dtype)
        delta = rewards[:, k] + gamma * next_value - values[:, k]
        advantage = delta + gamma * lam * next_advantage
        here = mask[:, k]
        advantages[:, k] = torch.where(here, advantage, 0.0)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, k], next_value)
        next_turn = torch.where(here, turns[:, k], next_turn)
    return layout.scatter(advantages), layout.scatter(advantages + values)


class DualDiscountGAE(AdvantageEstimator):
    """GAE with one discount pair between turns and one between the tokens of a turn.

    Args:
        gamma_step: discount from turn to turn.
        lam_step: trace decay from turn to turn.
        gamma_token: discount from token to token.
        lam_token: trace decay from token to token.
        whiten: see :class:`AdvantageEstimator`.
    """

    needs_values: ClassVar[bool] = True

    def __init__(
        self,
        gamma_step: float = 0.99,
        lam_step: float = 0.95,
        gamma_token: float = 1.0,
        lam_token: float = 1.0,
        whiten: bool = True,
    ) -> None:
        super().__init__(whiten)
        self.discounts = dict(gamma_step=gamma_step, lam_step=lam_step, gamma_token=gamma_token, lam_token=lam_token)
        for name, value in self.discounts.items():
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{type(self).__name__}: {name} must lie between 0 and 1, got {value}")

    def estimate(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        if rollout.scores.values is None or rollout.bootstrap_values is None:
            raise ValueError(f"{type(self).__name__} needs values, the rollout has none; give the agent a critic")
        rewards = rollout.rewards if rollout.shaped_rewards is None else rollout.shaped_rewards
        return dual_discount_gae(
            rewards,
            rollout.scores.values,
            rollout.action_mask,
            rollout.turn_ids,
            rollout.trajectory,
            rollout.terminated,
            rollout.bootstrap_values,
            **self.discounts,
        )


class GAE(DualDiscountGAE):
    """GAE with one discount pair for all transitions (Schulman et al. 2015, arXiv 1506.02438).

    Args:
        gamma: discount from token to token, also across turns.
        lam: trace decay, likewise.
        whiten: see :class:`AdvantageEstimator`.
    """

    def __init__(self, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> None:
        super().__init__(gamma, lam, gamma, lam, whiten)
