"""Scores within groups and the age of turns: `rollout/equal_groups`, `rollout/group_std`, `rollout/policy_lag`."""

from __future__ import annotations

import math

import pytest

from lightning_agentrl.advantages import Groups
from lightning_agentrl.agents.selection import kept_rows
from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.losses import DropEqualScores
from lightning_agentrl.metrics.rollout import group_numbers, kept_groups
from lightning_agentrl.types import Rollout, Sample
from lightning_agentrl.types.rounding import all_equal
from tests.types.samples import action, glue, prompt, turn

# Group 5: an episode of two rows (0.5 + 1) and one of a row (0.5). Group 6: one row of two turns (2 - 0.5) and 1.5.
# Group 7: a single episode.
EXPECTED = {
    "rollout/equal_groups": (0 + 1 + 1) / 3,
    "rollout/group_std": (math.sqrt(2 * 0.5**2) + 0 + 0) / 3,
    "rollout/policy_lag": (2 + 1 + 0 + 0 + 0 + 1 + 0) / 7,
}

OF_FILTER = {"rollout/kept_groups": 1 / 3}


def rollout() -> Rollout:
    def one(env: int, group: int, version: int, reward: float, index: int = 0) -> Sample:
        played = turn(env=env, group=group, policy_version=version, reward=reward, index=index)
        return Sample((prompt(1), action(2)), (played,))

    turns = tuple(turn(env=2, group=6, policy_version=9, reward=x, index=i) for i, x in enumerate((2.0, -0.5)))
    grown = Sample((prompt(1), action(2), glue(3), action(4)), turns)
    return Rollout.from_samples(
        [one(0, 5, 7, 0.5), one(0, 5, 8, 1.0, 1), one(1, 5, 9, 0.5), grown, one(3, 6, 8, 1.5), one(4, 7, 9, 4.0)]
    )


def filtered(rollout: Rollout) -> Rollout:
    return rollout.select(kept_rows(rollout, DropEqualScores(), lambda x: [x]))


def test_numbers_by_hand() -> None:
    assert over_ranks(group_numbers(rollout())) == pytest.approx(EXPECTED)
    backwards = rollout().select([5, 4, 3, 2, 1, 0])
    assert over_ranks(group_numbers(backwards)) == pytest.approx(EXPECTED)


def test_without_groups_there_is_nothing_to_say() -> None:
    assert group_numbers(Rollout.from_samples([Sample((prompt(1), action(2)), (turn(),))])) == {}
    assert over_ranks(group_numbers(rollout().select([]))) == {}


def test_what_a_filter_keeps() -> None:
    kept = filtered(rollout())
    assert kept.samples == rollout().samples[:3]
    assert over_ranks(kept_groups(rollout(), kept)) == OF_FILTER


def test_a_group_that_is_lost_is_not_kept() -> None:
    left = rollout().select([0, 1, 2])
    for filtered_too in (left, filtered(left)):
        assert over_ranks(kept_groups(rollout(), filtered_too)) == OF_FILTER


def test_rewards_that_cancel_may_leave_their_rounding_in_a_score() -> None:
    """Tens in float32 that add up to 0 in both episodes of group 5, and not in those of group 6."""
    rewards = {(0, 5): (30.1, 20.3, -50.4), (1, 5): (10.7, 40.9, -51.6), (2, 6): (30.1, -30.1), (3, 6): (30.1, -30.0)}
    samples = [
        Sample((prompt(1), action(2)), (turn(env=env, group=group, reward=reward, index=index),))
        for (env, group), of_turns in rewards.items()
        for index, reward in enumerate(of_turns)
    ]
    played = Rollout.from_samples(samples)
    assert float(played.outcomes[:6].abs().max()) > 1e-7
    kept = filtered(played)
    assert kept.groups is not None
    assert set(kept.groups.tolist()) == {6}
    assert over_ranks(kept_groups(played, kept)) == {"rollout/kept_groups": 1 / 2}
    assert over_ranks(group_numbers(played))["rollout/equal_groups"] == 1 / 2


def test_scores_are_equal_where_estimators_see_them_so() -> None:
    """The score of one episode misses 0 by more than its own rounding, and by less than that of both."""
    samples = [
        Sample((prompt(1), action(2)), (turn(env=env, group=5, reward=reward, index=index),))
        for env, rewards in enumerate([(1.0, -1.0), (1.0, -1.0 + 3 * 2**-24)])
        for index, reward in enumerate(rewards)
    ]
    played = Rollout.from_samples(samples)
    assert played.groups is not None
    assert played.outcome_rounding.max() < played.outcomes.max() < 2 * played.outcome_rounding.min()
    assert Groups(played.groups, played.outcome_rounding).equal(played.outcomes).all()
    assert over_ranks(group_numbers(played))["rollout/equal_groups"] == 1


def test_rewards_of_episodes_in_full_precision_may_cancel_too() -> None:
    assert all_equal([0.1 + 0.2 - 0.3, 0.0])
    assert not all_equal([1e-9, 0.0])
