"""Advantages from values estimated by Monte Carlo branches: no critic and no warm-up."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import AdvantageEstimator, token_rewards
from lightning_agentrl.advantages.layout import compress, result_dtype
from lightning_agentrl.types import ForkPlan, Rollout
from lightning_agentrl.types.rollout import Reduce


@torch.no_grad()
def minus_state_values(
    rewards_NJ: Tensor, values_NJ: Tensor, end_values_N: Tensor, mask_NJ: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Compute ``A = r + gamma V' - V`` of each turn from Monte Carlo values; turns between two values share A.

    With forked turns i < j and none between them, the turns i to j - 1 share::

        A = sum_m gamma^(m-i) r_m + gamma^(j-i) V_j - V_i,   return_m = r_m + gamma r_{m+1} + ... + gamma^(j-m) V_j

    Args:
        rewards_NJ: reward of each turn.
        values_NJ: value of the state before the turn; NaN if it was not forked.
        end_values_N: value of the state after the last turn; 0 if the episode ended there.
        mask_NJ: turns that exist, left-aligned.
        gamma: discount from turn to turn.

    Returns:
        Advantages and returns [N, J], 0 off the mask. The advantage is 0 if no value before the turn, or no value after
        the turn, is known. The return is 0 if no value after the turn is known.
    """
    returns_NJ = torch.zeros_like(rewards_NJ)
    known_NJ = ~values_NJ.isnan()
    after_N = end_values_N
    for j in reversed(range(rewards_NJ.shape[1])):
        returns_N = rewards_NJ[:, j] + gamma * after_N
        returns_NJ[:, j] = torch.where(mask_NJ[:, j], returns_N, 0)
        before_N = torch.where(known_NJ[:, j], values_NJ[:, j], returns_N)
        after_N = torch.where(mask_NJ[:, j], before_N, after_N)
    advantages_NJ = torch.full_like(rewards_NJ, torch.nan)
    shared_N = torch.full_like(end_values_N, torch.nan)
    for j in range(rewards_NJ.shape[1]):
        shared_N = torch.where(known_NJ[:, j], returns_NJ[:, j] - values_NJ[:, j], shared_N)
        advantages_NJ[:, j] = shared_N
    zero = torch.zeros_like(rewards_NJ)
    known_advantages_NJ = torch.where(mask_NJ & ~advantages_NJ.isnan(), advantages_NJ, zero)
    return known_advantages_NJ, torch.where(mask_NJ & ~returns_NJ.isnan(), returns_NJ, zero)


class Forked(AdvantageEstimator):
    """Advantages from Monte Carlo values: several episodes are continued from states of the rollout.

    The value of a state is the mean return of branches, which are episodes that start from this state. Branches are
    independent of what the rollout sampled after the state, so advantages are unbiased. All tokens of a turn share one
    advantage. KL rewards are refused, since branches have no KL rewards. Near a time limit of the environment, a value
    covers the remaining turns only.

    Forks give the best credit assignment per trained turn, but are less efficient per sampled turn than groups of
    episodes: use them to audit a critic, or if updates cost more than sampling.

    Args:
        branches: number of episodes to continue from each state.
        every: interval of valued states in turns. A state is valued if it is an episode's first state in the rollout,
            or if the index of the next turn is a multiple of ``every``; turns between two valued states share an
            advantage.
        gamma: discount from turn to turn.
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
    """

    def __init__(self, branches: int = 4, every: int = 1, gamma: float = 0.99, whiten: bool = True) -> None:
        super().__init__(whiten)
        self.needs_forks = ForkPlan(branches, every, gamma)
        self.branches, self.every, self.gamma = branches, every, gamma
        self.turn_discount = gamma

    @torch.no_grad()
    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        self.check(rollout)
        values, ends, plan = rollout.state_values, rollout.forked_end_values, self.needs_forks
        assert values is not None and ends is not None and plan is not None  # noqa: PT018 - checked above
        layout, dtype = compress(rollout.action_mask, rollout.turn_ids, rollout.episode), result_dtype(rollout.rewards)
        turns = layout.turns(rollout.turn_ids)
        advantages_NJ, returns_NJ = minus_state_values(
            turns.sum(layout.gather(token_rewards(rollout).double())),
            turns.at_starts(layout.gather(values.double())),
            ends.double()[layout.last_row_N],
            turns.mask_NJ,
            plan.gamma,
        )
        return layout.scatter(turns.spread(advantages_NJ).to(dtype)), layout.scatter(turns.spread(returns_NJ).to(dtype))
