"""The minimum-variance baseline at every token: OTB."""

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

EPS = 1e-8  # keeps the baseline defined where no token has energy


def optimal_token_baseline(
    to_go_NL: Tensor,
    energy_NL: Tensor,
    mask_NL: Tensor,
    groups: Groups,
    *,
    zero_tail: bool = True,
    leave_one_out: bool = False,
) -> Tensor:
    """Compute a baseline for every action token: the group's rewards to go at its place, weighted by realised energy.

    With W_k the sum of the energies of an episode's action tokens up to the k-th, over the episodes of the group with
    more than k action tokens::

        B_k = sum_i G_ik W_ik / (sum_i W_ik + 1e-8)

    Args:
        to_go_NL: G, rewards to go of the action tokens, side by side.
        energy_NL: see :func:`token_energy`.
        mask_NL: which action tokens there are, left-aligned.
        groups: of the N episodes.
        zero_tail: no baseline where only the longest episode of a group is left; off: almost its own reward to go.
        leave_one_out: an episode's own reward to go is not in its baseline, which removes a bias of order 1/N.

    Returns:
        [N, L], 0 in groups of one, undefined off the mask.
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
    """Reward to go of a token minus a baseline for its place in the episode, to which episodes contribute by the energy
    of their tokens so far: the baseline of least variance in the space of logits (arXiv 2602.07078).

    Places are counted in action tokens, so observations shift nothing. An episode alone in its group, and by
    default the tail of the longest one, keep their reward to go. Where the loss weights tokens to correct the
    mismatch between engine and trainer (``correction``), so does the energy, and tokens that it rejects have none. The
    ratio that stands for weights under ``Bypass`` is not counted. Returns are the rewards to go.

    That its gradient is less noisy than that of a leave-one-out baseline has not been shown here; see
    ``docs/results/gradients.md``.

    Args:
        zero_tail: no baseline where only the longest episode of a group is left; off: the advantage there is about 0.
        leave_one_out: leave an episode out of its own baseline.
        whiten: see :class:`AdvantageEstimator`.
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
        return "whose rewards to go are its advantages, without a baseline"

    def _energy(self, rollout: Rollout) -> Tensor:
        """Return the energy [B, A] of each token, by the weights of a correction if there are any."""
        scores = rollout.scores
        if scores.old_logps is None or scores.sum_pi_squared is None:
            raise ValueError("OptimalTokenBaseline needs scores.old_logps, which the rollout lacks")
        return token_energy(scores.old_logps, scores.sum_pi_squared, rollout.weights)
