"""OTB: the baseline of minimum variance at every token."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import token_rewards
from lightning_agentrl.advantages.episodes import GroupEstimator, Groups
from lightning_agentrl.advantages.layout import backward_sum, result_dtype
from lightning_agentrl.advantages.variance_proxy import token_energy
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rollout import Reduce

EPS = 1e-8  # avoids a division by 0 if no token has energy


def optimal_token_baseline(
    to_go_NL: Tensor,
    energy_NL: Tensor,
    mask_NL: Tensor,
    groups: Groups,
    *,
    zero_tail: bool = True,
    leave_one_out: bool = False,
) -> Tensor:
    """Compute a baseline for every action token: the group's energy-weighted mean reward to go at the token's index.

    W_ik is the sum of the energies of episode i's action tokens up to the k-th. Sums are over the episodes of the group
    that have a k-th action token::

        B_k = sum_i G_ik W_ik / (sum_i W_ik + 1e-8)

    Args:
        to_go_NL: G, rewards to go of the action tokens of each episode.
        energy_NL: energies of the tokens, see :func:`token_energy`.
        mask_NL: action tokens that exist, left-aligned.
        groups: groups of the N episodes.
        zero_tail: whether the baseline is 0 at indices that only the longest episode of a group reaches; if False, the
            baseline there is almost the episode's own reward to go.
        leave_one_out: whether to leave an episode out of its own baseline, which removes a bias of order 1/N.

    Returns:
        Baselines [N, L], 0 in groups of one, undefined off the mask.
    """
    realised_NL = torch.where(mask_NL, energy_NL.cumsum(1), 0)
    weighted_NL = realised_NL * torch.where(mask_NL, to_go_NL, 0)
    weights_NL, sums_NL = groups.sum(realised_NL), groups.sum(weighted_NL)
    if leave_one_out:
        weights_NL, sums_NL = (weights_NL - realised_NL).clamp_min(0), sums_NL - weighted_NL
    last_NL = groups.sum(mask_NL.to(realised_NL.dtype)) == 1
    none_NL = last_NL if zero_tail else groups.single_N[:, None]
    return torch.where(none_NL, 0, sums_NL / (weights_NL + EPS))


class OptimalTokenBaseline(GroupEstimator):
    """Reward to go of a token minus a baseline for its index in the episode (arXiv 2602.07078).

    The baseline is the mean reward to go of the group's episodes at the same index, weighted by the energy of their
    tokens so far, which minimizes the variance of the gradient with respect to logits. Indices count action tokens
    only. An episode that is alone in its group has no baseline, and by default neither has the tail of the longest
    episode. Importance weights of a ``correction`` also weight the energy, and rejected tokens have no energy. The
    ratio that replaces these weights under ``Bypass`` is not included. Returns are the rewards to go.

    This project has not shown that the gradient is less noisy than with a leave-one-out baseline; see
    ``docs/results/gradients.md``.

    Args:
        zero_tail: whether the baseline is 0 at indices that only the longest episode of a group reaches; if False, the
            advantage there is about 0.
        leave_one_out: whether to leave an episode out of its own baseline.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
    """

    needs_sum_pi_squared: ClassVar[bool] = True

    def __init__(
        self,
        zero_tail: bool = True,
        leave_one_out: bool = False,
        whiten: bool = False,
    ) -> None:
        super().__init__(whiten, "raw")
        self.zero_tail, self.leave_one_out = zero_tail, leave_one_out

    @torch.no_grad()
    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        episodes, dtype = self.episodes(rollout), result_dtype(token_rewards(rollout))
        layout = episodes.layout
        baseline_NL = optimal_token_baseline(
            to_go_NL := backward_sum(episodes.rewards_NL),
            torch.where(episodes.trained_NL, layout.gather(self._energy(rollout)), 0),
            layout.mask_NL,
            episodes.groups,
            zero_tail=self.zero_tail,
            leave_one_out=self.leave_one_out,
        )
        return layout.scatter((to_go_NL - baseline_NL).to(dtype)), layout.scatter(to_go_NL.to(dtype))

    def _meaning_of_one(self) -> str:
        return "so their advantages are the rewards to go, without a baseline"

    def _energy(self, rollout: Rollout) -> Tensor:
        """Return the energy [B, A] of each token, weighted by a correction if there is one."""
        scores = rollout.scores
        if scores.old_logps is None or scores.sum_pi_squared is None:
            raise ValueError("OptimalTokenBaseline needs scores.old_logps, which the rollout lacks")
        return token_energy(scores.old_logps, scores.sum_pi_squared, rollout.weights)
