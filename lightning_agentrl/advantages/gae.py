"""Generalized advantage estimation (GAE) over turns and tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import AdvantageEstimator, check_fractions, token_rewards
from lightning_agentrl.advantages.layout import Layout, backward_sum, compress, result_dtype
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce


@torch.no_grad()
def dual_discount_gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    turn_ids_BT: Tensor,
    episode_B: Tensor,
    terminated_B: Tensor,
    bootstrap_values_B: Tensor,
    *,
    gamma_step: float = 0.99,
    lam_step: float = 0.95,
    gamma_token: float = 1.0,
    lam_token: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute GAE with separate discounts and trace decays within a turn and from turn to turn (Verlog).

    For action tokens k of one episode, (g, l) is ``gamma_step, lam_step`` if token k + 1 is in another turn, else
    ``gamma_token, lam_token``::

        delta_k = r_k + g V_{k+1} - V_k,   A_k = delta_k + g l A_{k+1},   return_k = A_k + V_k

    Tokens off the mask are not steps. After the last token, V is 0 if the episode's last row is terminated, else that
    row's bootstrap value with the step discount, and A is 0. The last row is the last row with action tokens; flags and
    bootstrap values of other rows are ignored. With equal pairs, the result is the GAE of Schulman et al.
    (arXiv 1506.02438).

    Args:
        rewards_BT: reward of each token.
        values_BT: value of the state before each token.
        mask_BT: action mask.
        turn_ids_BT: id of each token's turn, non-decreasing along a row.
        episode_B: episode label of each row; rows with equal labels are one episode.
        terminated_B: whether the episode ended after the row, without a next state.
        bootstrap_values_B: value of the state after the row, used where an episode is cut.
        gamma_step: discount from turn to turn.
        lam_step: trace decay from turn to turn.
        gamma_token: discount from token to token of a turn.
        lam_token: trace decay from token to token of a turn.

    Returns:
        Advantages and returns [B, T] in float32 or better, 0 off the mask, without gradient.

    Raises:
        ValueError: shapes do not fit, or an episode's turns have no clear order (see ``compress``).
    """
    layout = compress(mask_BT, turn_ids_BT, episode_B)
    dtype = result_dtype(rewards_BT, values_BT)
    rewards, values = layout.gather(rewards_BT.to(dtype)), layout.gather(values_BT.to(dtype))
    turns, after_cut_N = layout.gather(turn_ids_BT), values_after(layout, terminated_B, bootstrap_values_B.to(dtype))

    has_next = torch.zeros_like(layout.mask_NL)
    has_next[:, :-1] = layout.mask_NL[:, 1:]
    is_step = ~has_next | (turns != turns.roll(-1, 1))
    next_values = torch.where(has_next, values.roll(-1, 1), after_cut_N[:, None])
    gamma = torch.where(is_step, values.new_tensor(gamma_step), gamma_token)
    lam = torch.where(is_step, values.new_tensor(lam_step), lam_token)
    delta = torch.where(layout.mask_NL, rewards + gamma * next_values - values, 0)

    advantages = backward_sum(delta, gamma * lam)  # after the last token of an episode delta is 0
    return layout.scatter(advantages), layout.scatter(advantages + values)


def values_after(layout: Layout, terminated_B: Tensor, bootstrap_values_B: Tensor) -> Tensor:
    """Return the value [N] of the state after each episode: 0 if its last row is terminated, else bootstrapped.

    Args:
        layout: layout of the episodes.
        terminated_B: whether the episode ended after the row, without a next state.
        bootstrap_values_B: value of the state after the row.

    Raises:
        ValueError: a tensor does not have the shape [B].
    """
    for name, x_B in (("terminated", terminated_B), ("bootstrap values", bootstrap_values_B)):
        if x_B.shape != layout.mask_BT.shape[:1]:
            raise ValueError(f"expected {name} of shape {list(layout.mask_BT.shape[:1])}, got {list(x_B.shape)}")
    return torch.where(terminated_B.bool(), 0, bootstrap_values_B)[layout.last_row_N]


class DualDiscountGAE(AdvantageEstimator):
    """GAE with separate discounts and trace decays between turns and between the tokens of a turn.

    Args:
        gamma_step: discount from turn to turn.
        lam_step: trace decay from turn to turn.
        gamma_token: discount from token to token of a turn.
        lam_token: trace decay from token to token of a turn.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
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
        check_fractions(self, gamma_step=gamma_step, lam_step=lam_step, gamma_token=gamma_token, lam_token=lam_token)
        self.gamma_step, self.lam_step = gamma_step, lam_step
        self.turn_discount, self.token_discount = gamma_step, gamma_token
        self.gamma_token, self.lam_token = gamma_token, lam_token

    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        return dual_discount_gae(
            *gae_inputs(self, rollout),
            gamma_step=self.gamma_step,
            lam_step=self.lam_step,
            gamma_token=self.gamma_token,
            lam_token=self.lam_token,
        )


class GAE(DualDiscountGAE):
    """GAE with one discount and one trace decay for all transitions (Schulman et al. 2015, arXiv 1506.02438).

    Args:
        gamma: discount from token to token, also across turns.
        lam: trace decay from token to token, also across turns.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
    """

    def __init__(self, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> None:
        check_fractions(self, gamma=gamma, lam=lam)
        super().__init__(gamma, lam, gamma, lam, whiten)
        self.gamma, self.lam = gamma, lam


def gae_inputs(estimator: AdvantageEstimator, rollout: Rollout) -> tuple[Tensor, ...]:
    """Return the tensor arguments of :func:`dual_discount_gae`, in the order of its parameters."""
    estimator.check(rollout)
    assert rollout.scores.values is not None
    assert rollout.bootstrap_values is not None
    return (
        token_rewards(rollout),
        rollout.scores.values,
        rollout.action_mask,
        rollout.turn_ids,
        rollout.episode,
        rollout.terminated,
        rollout.bootstrap_values,
    )
