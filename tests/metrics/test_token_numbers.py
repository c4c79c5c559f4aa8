"""Means over reply tokens: `kl/*`, `rollout/entropy`."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.metrics.rollout import thought_mask, token_numbers
from lightning_agentrl.types import Rollout, Scores
from tests.metrics.rollouts import by_hand

# Log-ratios of actor to reference, token by token: thought | action
#   A 1 2 | 0    B 1 | -1    C | 3    D 0 1 0 | 2 1    E 1 | 0    F 1 | 2    G 0 | 1 2    H -2 1 |
EXPECTED = {
    "rollout/entropy": ((2 + 1 + 0) + (3 + 1) + 2 + (1 + 1 + 2 + 0 + 1) + (4 + 0) + (1 + 2) + (1 + 3 + 0) + (2 + 3))
    / 20,
    "kl/thought": ((1 + 2) + 1 + (0 + 1 + 0) + 1 + 1 + 0 + (-2 + 1)) / 11,
    "kl/action": (0 - 1 + 3 + (2 + 1) + 0 + 2 + (1 + 2)) / 9,
    "kl/reference": ((1 + 2 + 0) + (1 - 1) + 3 + (0 + 1 + 0 + 2 + 1) + (1 + 0) + (1 + 2) + (0 + 1 + 2) + (-2 + 1)) / 20,
}


def computed(rollout: Rollout) -> dict[str, float]:
    return over_ranks(token_numbers(rollout))


def without(rollout: Rollout, *names: str) -> Rollout:
    kept = {f.name: getattr(rollout.scores, f.name) for f in fields(Scores) if f.name not in names}
    return replace(rollout, scores=Scores(**kept))


def test_every_number_by_hand():
    assert computed(by_hand()) == pytest.approx(EXPECTED, rel=0, abs=1e-12)


def test_thoughts_and_actions_are_told_apart_in_growing_samples_too():
    thought, mask = thought_mask(by_hand()), by_hand().action_mask
    assert thought.int().tolist()[0] == [1, 1, 0, 0, 0, 0, 0]
    assert thought.int().tolist()[5] == [1, 0, 1, 0, 0, 1, 1]  # F: 1 of 2, G: 1 of 3, H: 2 of 2
    assert (int(thought.sum()), int((mask & ~thought).sum())) == (11, 9)
    assert not bool((thought & ~mask).any())


def test_the_kl_of_all_tokens_is_that_of_its_parts_by_their_size():
    numbers = computed(by_hand())
    assert numbers["kl/reference"] == pytest.approx((11 * numbers["kl/thought"] + 9 * numbers["kl/action"]) / 20)


def test_without_thoughts_the_kl_of_thoughts_is_left_out():
    numbers = computed(by_hand(without_thoughts_of=[0, 1, 2]))
    assert "kl/thought" not in numbers
    assert numbers["kl/action"] == numbers["kl/reference"] == pytest.approx(EXPECTED["kl/reference"])


def test_what_was_not_scored_is_left_out():
    assert computed(without(by_hand(), "ref_logps")).keys() == {"rollout/entropy"}
    assert computed(without(by_hand(), "old_logps")).keys() == {"rollout/entropy"}
    assert computed(without(by_hand(), "old_logps", "entropy")) == {}
