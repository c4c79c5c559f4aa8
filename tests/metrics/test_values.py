"""What the critic knows before the update: `critic/*` but the loss."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace

import pytest
import torch

from lightning_agentrl.advantages import dual_discount_gae, value_statistics
from lightning_agentrl.agents.metrics_of_run import describe
from lightning_agentrl.types import Scores
from tests.metrics.rollouts import by_hand

# Sums over the 20 tokens, turn by turn A to H
VALUES = (1 + 2 + 1) + (3 + 1) + 0 + (1 + 2 + 2 + 4 + 1) + (0 + 2) + (2 + 1) + (1 + 3 + 2) + (0 + 1)
VALUES_SQUARED = (1 + 4 + 1) + (9 + 1) + 0 + (1 + 4 + 4 + 16 + 1) + (0 + 4) + (4 + 1) + (1 + 9 + 4) + (0 + 1)
RETURNS = (2 + 2 + 4) + (4 + 0) - 1 + (3 + 1 + 2 + 5 + 1) + (0 + 0) + (1 + 3) + (1 + 2 + 4) + (-1 + 1)
RETURNS_SQUARED = (4 + 4 + 16) + (16 + 0) + 1 + (9 + 1 + 4 + 25 + 1) + (0 + 0) + (1 + 9) + (1 + 4 + 16) + (1 + 1)
# return - value: A 1 0 3, B 1 -1, C -1, D 2 -1 0 1 0, E 0 -2, F -1 2, G 0 -1 2, H -1 0
ERRORS = (1 + 0 + 3) + (1 - 1) - 1 + (2 - 1 + 0 + 1 + 0) + (0 - 2) + (-1 + 2) + (0 - 1 + 2) + (-1 + 0)
ERRORS_SQUARED = (1 + 0 + 9) + (1 + 1) + 1 + (4 + 1 + 0 + 1 + 0) + (0 + 4) + (1 + 4) + (0 + 1 + 4) + (1 + 0)

RETURN_VARIANCE = RETURNS_SQUARED / 20 - (RETURNS / 20) ** 2
ERROR_VARIANCE = ERRORS_SQUARED / 20 - (ERRORS / 20) ** 2

EXPECTED = {
    "critic/value_mean": VALUES / 20,
    "critic/value_std": math.sqrt(VALUES_SQUARED / 20 - (VALUES / 20) ** 2),
    "critic/return_mean": RETURNS / 20,
    "critic/return_std": math.sqrt(RETURN_VARIANCE),
    "critic/value_error": math.sqrt(ERRORS_SQUARED / 20),
    "critic/explained_variance": 1 - ERROR_VARIANCE / RETURN_VARIANCE,
}


def statistics(values: list[float], returns: list[float]) -> dict[str, float]:
    mask = torch.ones(1, len(values), dtype=torch.bool)
    return asdict(value_statistics(torch.tensor([values]), torch.tensor([returns]), mask))


def test_every_number_by_hand():
    rollout = by_hand()
    numbers = describe(rollout, lambda x: x)
    assert {n: x for n, x in numbers.items() if n.startswith("critic/")} == pytest.approx(EXPECTED, rel=0, abs=1e-12)
    assert RETURNS - VALUES == ERRORS  # the table above is right


def test_a_constant_offset_is_an_error_but_explains_everything():
    numbers = statistics([1.0, 3.0], [3.0, 5.0])
    assert numbers == pytest.approx(
        {
            "value_mean": 2,
            "value_std": 1,
            "return_mean": 4,
            "return_std": 1,
            "value_error": 2,
            "explained_variance": 1,
        }
    )


def test_values_that_are_all_the_same_explain_nothing_and_wrong_ones_less_than_nothing():
    assert statistics([2.0, 2.0], [1.0, 3.0])["explained_variance"] == 0
    assert statistics([3.0, 1.0], [1.0, 3.0])["explained_variance"] == 1 - 4 / 1


def test_equal_returns_leave_nothing_to_explain():
    numbers = statistics([1.0, 3.0], [2.0, 2.0])
    assert math.isnan(numbers.pop("explained_variance"))
    assert numbers == {"value_mean": 2, "value_std": 1, "return_mean": 2, "return_std": 0, "value_error": 1}


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("tokens", [1, 12, 3000])
def test_equal_returns_made_of_advantages_and_values_differ_by_rounding_only(reward, tokens):
    size, draw = (8, tokens), torch.Generator().manual_seed(0)
    mask, values = torch.ones(size, dtype=torch.bool), torch.randn(size, generator=draw)
    rewards = torch.zeros(size)
    rewards[:, -1] = reward
    ended, episodes = torch.ones(8, dtype=torch.bool), torch.arange(8)
    _, returns = dual_discount_gae(
        rewards, values, mask, torch.zeros(size).long(), episodes, ended, torch.zeros(8), gamma_step=1, lam_step=1
    )
    numbers = value_statistics(values, returns, mask)
    assert math.isnan(numbers.explained_variance)
    assert numbers.return_mean == pytest.approx(reward, abs=1e-4)


def test_a_small_variance_of_the_returns_is_one():
    returns = [1.0, 1.001]
    assert statistics([1.0, 1.001], returns)["explained_variance"] == pytest.approx(1, abs=1e-6)
    assert statistics([0.0, 0.0], returns)["explained_variance"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("unit", [1e-6, 1e-3, 1e3, 1e6])
def test_what_is_explained_does_not_depend_on_the_unit_of_rewards(unit: float):
    values, returns = [1.0, 2.0, 0.0, 4.0], [2.0, 1.0, 0.5, 3.0]
    scaled = statistics([x * unit for x in values], [x * unit for x in returns])
    assert scaled["explained_variance"] == pytest.approx(statistics(values, returns)["explained_variance"], rel=1e-4)


@pytest.mark.parametrize(("value", "back"), [(1000.0, 0.0), (0.0, 1000.0)])
def test_returns_that_differ_less_than_the_rounding_of_values_or_returns_are_equal(value: float, back: float):
    """Of numbers near 1000, float32 keeps steps of 6e-5."""
    for difference, equal in ((0.004, True), (0.04, False)):
        explained = statistics([value] * 2, [back, back + difference])["explained_variance"]
        assert math.isnan(explained) == equal


def test_without_values_or_returns_nothing_is_said_about_the_critic():
    rollout = by_hand()
    for without in (replace(rollout, returns=None), replace(rollout, scores=replace(rollout.scores, values=None))):
        numbers = describe(without, lambda x: x)
        assert not [name for name in numbers if name.startswith("critic/")]


def test_rows_whose_scores_were_not_finite_say_nothing_but_their_turns_count():
    rollout = by_hand()
    spoilt_B = torch.tensor([0, 0, 0, 1, 0, 1], dtype=torch.bool)
    spoilt = rollout.union(
        scores=Scores(**{name: torch.where(spoilt_B[:, None], 50.0, x) for name, x in rollout.scores.tensors.items()}),
        returns=torch.where(spoilt_B[:, None], -50.0, rollout.returns),
    )
    numbers, whole = describe(spoilt, lambda x: x, spoilt_B), describe(rollout, lambda x: x)
    rest = describe(rollout.select(~spoilt_B), lambda x: x)
    of_scores = {name for name in whole if re.match("critic/|mismatch/|kl/|rollout/entropy", name)}
    assert {name: numbers[name] for name in of_scores} == {name: rest[name] for name in of_scores}
    assert numbers.keys() == whole.keys()
    assert all(numbers[name] == whole[name] for name in whole.keys() - of_scores)


def test_without_a_token_nothing_is_said_about_the_critic():
    numbers = describe(by_hand(), lambda x: x, torch.ones(6, dtype=torch.bool))
    assert not [name for name in numbers if name.startswith("critic/")]
