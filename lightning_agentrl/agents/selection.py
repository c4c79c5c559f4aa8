"""Which tokens and which groups of a rollout are trained on, and what is random in that choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_agentrl.advantages import Groups, Reduce
from lightning_agentrl.losses import Gather, GroupFilter, OffPolicyCorrection
from lightning_agentrl.types import Rollout, StopReason


def corrected(rollout: Rollout, correction: OffPolicyCorrection | None, reduce: Reduce) -> Rollout:
    """Return the rollout with weights and without rejected tokens, where there is a correction that gives any.

    Args:
        rollout: scored.
        correction: of the agent.
        reduce: sums a tensor over ranks.
    """
    if correction is None or not correction.needs_old_logps:
        return rollout
    assert rollout.scores.old_logps is not None
    weights, keep = correction(rollout.scores.old_logps, rollout.rollout_logps, rollout.trained_mask, reduce)
    return replace(rollout, weights=weights, loss_mask=keep)


def kept_rows(rollout: Rollout, group_filter: GroupFilter, gather: Gather) -> Tensor:
    """Return the rows [B] (bool) of the groups that the filter keeps, by the rewards of the environment.

    Args:
        rollout: of groups.
        group_filter: of the agent.
        gather: gives what every rank holds.
    """
    assert rollout.groups is not None
    groups, scores_B = Groups(rollout.groups, rollout.outcome_rounding), rollout.outcomes
    scores_B = torch.where(groups.equal(scores_B), groups.max(scores_B), scores_B)  # as estimators see them
    return group_filter(rollout.groups, scores_B, rollout.episode, gather)


def lost_rows(rollout: Rollout, bootstraps: bool, group_size: int | None) -> Tensor:
    """Return the rows [B] (bool) that nothing can be learnt from, since an environment failed.

    With groups these are the rows of groups that lack an episode. Otherwise they are those of episodes that a fault
    ended, unless a value stands for the rest of them. With forks they are also those of episodes whose first state, or
    the one after the last turn, has no value, since all its branches were lost.

    Args:
        rollout: as it was collected.
        bootstraps: whether the estimator does so where an episode is cut.
        group_size: episodes of a group; None: a fixed number of turns was collected.
    """
    lost_B = torch.zeros(len(rollout), dtype=torch.bool)
    failed_B = torch.tensor([sample.turns[-1].stop is StopReason.ENV_FAULT for sample in rollout.samples]).bool()
    unvalued_B = torch.isin(rollout.episode, rollout.episode[_unvalued(rollout)])
    if group_size is None:
        return lost_B if bootstraps else torch.isin(rollout.episode, rollout.episode[failed_B]) | unvalued_B
    if rollout.greedy_scores is not None:
        failed_B |= rollout.greedy_scores.isnan()
    groups = [sample.turns[0].group for sample in rollout.samples]  # with all sides: not every one has to have a turn
    places: dict[int | None, set[int]] = {}
    for group, sample in zip(groups, rollout.samples, strict=True):
        places.setdefault(group, set()).add(sample.turns[0].env)
    broken = {group for group, failed in zip(groups, failed_B.tolist(), strict=True) if failed}
    broken_B = torch.tensor([group in broken or len(places[group]) != group_size for group in groups]).bool()
    return broken_B | unvalued_B


def _unvalued(rollout: Rollout) -> Tensor:
    """Return the rows [B] (bool) of forked states without a value that the advantages of their neighbours cannot do
    without: those after the last turn of an episode, and those before its first one here.
    """
    values_BA, ends_B = rollout.state_values, rollout.forked_end_values
    if values_BA is None or ends_B is None:
        return torch.zeros(len(rollout), dtype=torch.bool)
    episodes, samples = rollout.episode.tolist(), rollout.samples
    backwards = sorted(range(len(rollout)), key=lambda row: samples[row].turns[0].index, reverse=True)
    firsts = torch.tensor(sorted({episodes[row]: row for row in backwards}.values()), dtype=torch.int64)
    unknown_B = ends_B.isnan()
    unknown_B[firsts] |= values_BA[firsts, :1].isnan().any(1)
    return unknown_B


def without_rows(rollout: Rollout, lost_B: Tensor) -> Rollout:
    """Return the rollout with no token of these rows to train on, and without their greedy scores."""
    if not lost_B.any():
        return rollout
    greedy = rollout.greedy_scores
    return replace(
        rollout,
        loss_mask=rollout.trained_mask & ~lost_B[:, None],
        greedy_scores=None if greedy is None else torch.where(lost_B, 0.0, greedy),
    )


def token_noise(rollout: Rollout, seed: int) -> Tensor:
    """Draw a number for each token: [B, A] float64 in [0, 1), 0 off the action mask.

    A token has the same number on whichever rank and in whichever order its row lies, since each row draws from a seed
    of its own.

    Args:
        rollout: rows of a mini-batch.
        seed: of the mini-batch.
    """
    noise_BA = torch.zeros(rollout.action_mask.shape, dtype=torch.float64)
    for row, (sample, count) in enumerate(zip(rollout.samples, rollout.action_mask.sum(1).tolist(), strict=True)):
        turn = sample.turns[0]
        generator = np.random.default_rng([seed, turn.env, turn.episode, turn.index])
        noise_BA[row, :count] = torch.from_numpy(generator.random(count))
    return noise_BA
