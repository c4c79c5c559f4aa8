"""Selection of the rows and tokens of a rollout to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_agentrl.advantages import Groups, Reduce, whiten
from lightning_agentrl.distributed import all_gather
from lightning_agentrl.losses import Gather, GroupFilter, OffPolicyCorrection
from lightning_agentrl.types import Rollout, StopReason, Turn

SHOWN = 3  # largest number of turns or tensors named in a message
# These are NaN for lost episodes or states without branches.
MAY_LACK = ("greedy_scores", "state_values", "forked_end_values")


def select(agent: Any, rollout: Rollout, faulty_B: Tensor, lost_B: Tensor) -> tuple[Rollout, Rollout]:
    """Choose the rows to train on, and whiten the advantages over their tokens.

    Args:
        agent: an ``Agent``.
        rollout: rollout with advantages and returns.
        faulty_B: mask of rows with non-finite numbers.
        lost_B: mask of rows that cannot be trained on, since an environment failed.

    Returns:
        The rollout with all rows, and the rollout with the chosen rows.
    """
    # The warm-up uses lost rows only if values bootstrap them, since returns of lost rows are wrong without values.
    takes_lost = agent.phase == "critic_warmup" and agent.advantage.needs_values
    chosen_B = ~(faulty_B if takes_lost else faulty_B | lost_B)
    if agent.group_filter is not None and agent.phase == "train":
        kept_B = kept_rows(rollout.select(chosen_B), agent.group_filter, agent.ranks.gather)
        chosen_B[chosen_B.clone()] = kept_B
    if agent.advantage.whiten:
        assert rollout.advantages is not None
        trained = without_rows(rollout, lost_B | ~chosen_B).trained_mask
        rollout = rollout.union(advantages=whiten(rollout.advantages, trained, agent.ranks.sum))
    return rollout, rollout if chosen_B.all() else rollout.select(chosen_B)


def corrected(rollout: Rollout, correction: OffPolicyCorrection | None, reduce: Reduce) -> Rollout:
    """Add the importance weights of the agent's correction, if any, and mask rejected tokens.

    Args:
        rollout: scored rollout.
        correction: correction of the agent.
        reduce: function that sums a tensor over ranks.
    """
    if correction is None or not correction.needs_old_logps:
        return rollout
    logps = rollout.scores.old_logps
    assert logps is not None
    weights, keep = correction(logps, rollout.rollout_logps, rollout.trained_mask & logps.isfinite(), reduce)
    return replace(rollout, weights=weights, loss_mask=keep)


def without_not_finite(rollout: Rollout) -> tuple[Rollout, Tensor, list[str]]:
    """Mask episodes with non-finite numbers.

    Whole episodes are masked, since each advantage depends on the numbers of its whole episode.

    Args:
        rollout: scored rollout with shaped rewards.

    Returns:
        The rollout with the episodes masked and non-finite numbers replaced by 0; a mask [B] of the masked rows, which
        must not be passed through a model again, since NaN times 0 is NaN; and descriptions of the non-finite numbers:
        name and turns.
    """
    rows_B = torch.zeros(len(rollout), dtype=torch.bool)
    zeroed: dict[str, Tensor] = {}
    names: list[str] = []
    for name, x in rollout.tensors.items():
        if name in MAY_LACK or not x.is_floating_point() or x.isfinite().all():
            continue
        bad_BA = rollout.action_mask & ~x.isfinite().view(len(rollout), -1)
        zeroed[name] = torch.where(x.isfinite(), x, 0.0)
        if bad_BA.any():
            rows_B |= bad_BA.any(1)
            names.append(f"{name} of {named(turns_at(rollout, bad_BA))}")
    faulty_B = torch.isin(rollout.episode, rollout.episode[rows_B])
    if not rows_B.any():
        return rollout, faulty_B, []
    rollout = rollout.with_tensors(zeroed)
    return replace(rollout, loss_mask=rollout.trained_mask & ~faulty_B[:, None]), faulty_B, names


def first_fault(losses: Sequence[tuple[str, Tensor, Rollout]]) -> str:
    """Return a description of the first non-finite loss and its turns; an empty string if all are finite.

    Args:
        losses: name, loss per token [B, A] and micro-batch of each loss.
    """
    for name, loss, micro in losses:
        if turns := turns_at(micro, micro.trained_mask & ~loss.isfinite()):
            return f"{name} of {named(turns)} is not finite"
    return ""


def named(turns: Sequence[Turn]) -> str:
    """Describe turns by environment, episode and index, at most ``SHOWN`` of them."""
    places = "; ".join(f"environment {t.env}, episode {t.episode}, turn {t.index}" for t in turns[:SHOWN])
    return places + (f" and {len(turns) - SHOWN} more turns" if len(turns) > SHOWN else "")


def turns_at(rollout: Rollout, where_BA: Tensor) -> list[Turn]:
    """Return the turns that contain tokens of a mask [B, A]."""
    found = []
    for row in where_BA.any(1).nonzero().flatten().tolist():
        wanted = set(rollout.turn_ids[row][where_BA[row]].tolist())
        found += [turn for turn in rollout.samples[row].turns if turn.index in wanted]
    return found


def report_left_out(
    rollout: Rollout, faulty_B: Tensor, names: Sequence[str], stop: Callable[[str], object]
) -> dict[str, float]:
    """Warn of turns on all ranks that are left out of training, and return their number; every rank must call this.

    Args:
        rollout: rollout of this rank.
        faulty_B: mask of rows that are left out.
        names: descriptions of the non-finite numbers: name and turns.
        stop: function that stops the run with a reason; called if no turn is left.
    """
    own = len(rollout.select(faulty_B).turns)
    outs, turns, faults = zip(*all_gather((own, len(rollout.turns), names[:SHOWN])), strict=True)
    out, every, listed = sum(outs), sum(turns), ", ".join(chain.from_iterable(faults))
    if out:
        rank_zero_warn(f"{out} of {every} turns are not trained on; not finite: {listed}")
    if out and out == every:
        stop(f"no turn of the rollout has finite numbers ({listed})")
    return {"guard/turns_left_out": float(out)}


def kept_rows(rollout: Rollout, group_filter: GroupFilter, gather: Gather) -> Tensor:
    """Return a mask [B] of the rows in groups that the filter keeps, based on the environment's rewards.

    Args:
        rollout: rollout with groups.
        group_filter: filter of the agent.
        gather: function that gathers a tensor from all ranks.
    """
    assert rollout.groups is not None
    groups, scores_B = Groups(rollout.groups, rollout.outcome_rounding), rollout.outcomes
    # Scores that are equal up to rounding are made equal, as in estimators.
    scores_B = torch.where(groups.equal(scores_B), groups.max(scores_B), scores_B)
    return group_filter(rollout.groups, scores_B, rollout.episode, gather)


def lost_rows(rollout: Rollout, bootstraps: bool, group_size: int | None) -> Tensor:
    """Return a mask [B] of rows that cannot be trained on, since an environment failed.

    With groups, the mask has the rows of incomplete groups. Without groups, the mask has the rows of episodes that
    ended by a fault, unless the estimator bootstraps such episodes. With forks, the mask also has the rows of episodes
    whose first state, or the state after their last turn, has no value because all its branches were lost.

    Args:
        rollout: collected rollout.
        bootstraps: whether the estimator bootstraps from values where an episode is cut.
        group_size: number of episodes in a group; None: a fixed number of turns was collected.
    """
    if group_size is None and bootstraps:
        return torch.zeros(len(rollout), dtype=torch.bool)
    failed_B = torch.tensor([sample.turns[-1].stop is StopReason.ENV_FAULT for sample in rollout.samples]).bool()
    unvalued_B = torch.isin(rollout.episode, rollout.episode[_unvalued(rollout)])
    if group_size is None:
        return torch.isin(rollout.episode, rollout.episode[failed_B]) | unvalued_B
    if rollout.greedy_scores is not None:
        failed_B |= rollout.greedy_scores.isnan()
    groups = [sample.turns[0].group for sample in rollout.samples]  # groups of all sides, since a side may have no turn
    places: dict[int | None, set[int]] = {}
    for group, sample in zip(groups, rollout.samples, strict=True):
        places.setdefault(group, set()).add(sample.turns[0].env)
    broken = {group for group, failed in zip(groups, failed_B.tolist(), strict=True) if failed}
    broken_B = torch.tensor([group in broken or len(places[group]) != group_size for group in groups]).bool()
    return broken_B | unvalued_B


def _unvalued(rollout: Rollout) -> Tensor:
    """Return a mask [B] of rows with a missing state value that their advantages require.

    Advantages require the values of the states before an episode's first turn in the rollout and after its last turn.
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
    """Mask all tokens of lost rows, and replace their greedy scores by 0."""
    if not lost_B.any():
        return rollout
    greedy = rollout.greedy_scores
    return replace(
        rollout,
        loss_mask=rollout.trained_mask & ~lost_B[:, None],
        greedy_scores=None if greedy is None else torch.where(lost_B, 0.0, greedy),
    )


def token_noise(rollout: Rollout, seed: int) -> Tensor:
    """Draw a random number for each action token: [B, A] float64 in [0, 1), 0 off the action mask.

    Each row has a separate seed, so numbers do not depend on the rank or the order of rows.

    Args:
        rollout: rows of a mini-batch.
        seed: seed of the mini-batch.
    """
    noise_BA = torch.zeros(rollout.action_mask.shape, dtype=torch.float64)
    for row, (sample, count) in enumerate(zip(rollout.samples, rollout.action_mask.sum(1).tolist(), strict=True)):
        turn = sample.turns[0]
        generator = np.random.default_rng([seed, turn.env, turn.episode, turn.index])
        noise_BA[row, :count] = torch.from_numpy(generator.random(count))
    return noise_BA
