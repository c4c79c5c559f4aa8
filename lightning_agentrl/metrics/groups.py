"""Metrics of a rollout's groups, as sums that can be added over ranks."""

from __future__ import annotations

import statistics

from lightning_agentrl.metrics.numbers import Mean, Number
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.rounding import all_equal


def group_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return the spread of scores within groups and the age of turns; empty without groups."""
    if rollout.groups is None:
        return {}
    scores: dict[int, dict[int, float]] = {}  # of each episode of a group
    rounding: dict[int, float] = {}  # by which two of a group may differ
    columns = (rollout.groups, rollout.episode, rollout.outcomes, rollout.outcome_rounding)
    for group, episode, score, off in zip(*(x.tolist() for x in columns), strict=True):
        scores.setdefault(group, {})[episode] = score
        rounding[group] = max(rounding.get(group, 0.0), 2 * off)
    groups = [list(of_group.values()) for of_group in scores.values()]
    equal = sum(all_equal(list(of_group.values()), rounding[group]) for group, of_group in scores.items())
    versions = [turn.policy_version for turn in rollout.turns]
    newest = max(versions, default=0)
    return {
        "rollout/equal_groups": Mean(equal, len(groups)),
        "rollout/group_std": Mean(sum(statistics.stdev(g) for g in groups if len(g) > 1), len(groups)),
        "rollout/policy_lag": Mean(sum(newest - version for version in versions), len(versions)),
    }


def kept_groups(collected: Rollout, trained: Rollout) -> dict[str, Number]:
    """Return how many of the groups that were collected are trained on: neither lost nor left out by a filter."""
    assert collected.groups is not None
    assert trained.groups is not None
    return {"rollout/kept_groups": Mean(len(trained.groups.unique()), len(collected.groups.unique()))}
