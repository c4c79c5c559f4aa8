"""Bi-level GAE: one recursion from turn to turn, then one inside each turn."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import AdvantageEstimator, check_fractions
from lightning_agentrl.advantages.gae import gae_inputs, values_after
from lightning_agentrl.advantages.layout import backward_sum, compress, result_dtype
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce


@torch.no_grad()
def bilevel_gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    turn_ids_BT: Tensor,
    episode_B: Tensor,
    terminated_B: Tensor,
    bootstrap_values_B: Tensor,
    *,
    gamma_turn: float = 0.95,
    lam_turn: float = 1.0,
    gamma_token: float = 1.0,
    lam_token: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute GAE from turn to turn, then over each turn's tokens from the turn's result (VAGEN, arXiv 2510.16907).

    With e_j the last action token of turn j::

        D_j = r(e_j) + gamma_turn V(e_{j+1}) - V(e_j) + gamma_turn lam_turn D_{j+1},   A(e_j) = D_j
        A_t = r_t + gamma_token V_{t+1} - V_t + gamma_token lam_token A_{t+1}   at earlier tokens t of the turn

    After the last turn V is 0 if the episode's last row is terminated, else that row's bootstrap value. Turns end
    where ``turn_ids`` change, with or without a reward. Rewards of other tokens count inside their turn only.

    Args:
        rewards_BT: reward of each token.
        values_BT: value of the state before each token.
        mask_BT: action mask.
        turn_ids_BT: id of each token's turn, non-decreasing along a row.
        episode_B: episode label of each row; rows with equal labels are one episode.
        terminated_B: whether the episode ended after the row, without a next state.
        bootstrap_values_B: value of the state after the row, used where an episode is cut.
        gamma_turn: discount from turn to turn.
        lam_turn: trace decay from turn to turn.
        gamma_token: discount from token to token of a turn.
        lam_token: trace decay from token to token of a turn.

    Returns:
        Advantages and returns (advantage plus value) [B, T] in float32 or better, 0 off the mask, without gradient.

    Raises:
        ValueError: shapes do not fit, or an episode's turns have no clear order (see ``compress``).
    """
    layout = compress(mask_BT, turn_ids_BT, episode_B)
    dtype = result_dtype(rewards_BT, values_BT)
    rewards, values = layout.gather(rewards_BT.to(dtype)), layout.gather(values_BT.to(dtype))
    turns = layout.turns(turn_ids_BT)

    last_NJ = turns.mask_NJ & ~torch.nn.functional.pad(turns.mask_NJ, (0, 1))[:, 1:]
    after_cut_N = values_after(layout, terminated_B, bootstrap_values_B.to(dtype))
    values_NJ = turns.at_ends(values)
    next_NJ = torch.where(last_NJ, after_cut_N[:, None], values_NJ.roll(-1, 1))
    delta_NJ = torch.where(turns.mask_NJ, turns.at_ends(rewards) + gamma_turn * next_NJ - values_NJ, 0)
    of_turns_NJ = backward_sum(delta_NJ, gamma_turn * lam_turn)

    inside = layout.mask_NL & ~turns.ends_NL
    delta = torch.where(inside, rewards + gamma_token * values.roll(-1, 1) - values, turns.spread(of_turns_NJ))
    advantages = backward_sum(delta, torch.where(inside, delta.new_tensor(gamma_token * lam_token), 0))
    return layout.scatter(advantages), layout.scatter(advantages + values)


class BiLevelGAE(AdvantageEstimator):
    """GAE from turn to turn, then from token to token inside each turn (arXiv 2510.16907).

    Args:
        gamma_turn: discount from turn to turn.
        lam_turn: trace decay from turn to turn.
        gamma_token: discount from token to token of a turn.
        lam_token: trace decay from token to token of a turn.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
    """

    needs_values: ClassVar[bool] = True

    def __init__(
        self,
        gamma_turn: float = 0.95,
        lam_turn: float = 1.0,
        gamma_token: float = 1.0,
        lam_token: float = 1.0,
        whiten: bool = True,
    ) -> None:
        super().__init__(whiten)
        check_fractions(self, gamma_turn=gamma_turn, lam_turn=lam_turn, gamma_token=gamma_token, lam_token=lam_token)
        self.gamma_turn, self.lam_turn = gamma_turn, lam_turn
        self.turn_discount, self.token_discount = gamma_turn, gamma_token
        self.gamma_token, self.lam_token = gamma_token, lam_token

    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        return bilevel_gae(
            *gae_inputs(self, rollout),
            gamma_turn=self.gamma_turn,
            lam_turn=self.lam_turn,
            gamma_token=self.gamma_token,
            lam_token=self.lam_token,
        )
