"""What is measured of episodes, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_agentrl.metrics.facts import (
    Measured,
    MeasuredEpisode,
    measure,
    met_again,
    met_in_others,
    middle_and_most,
    ratio,
    share,
    share_of_turns,
    student_quantile,
    uncertain,
    variances,
)
from lightning_agentrl.metrics.quick_critic import explained_variance, ridge
from lightning_agentrl.types import StopReason
from tests.types.samples import turn

DONE = {"terminated": True, "stop": StopReason.ENV_DONE}
LIMIT = {"truncated": True, "stop": StopReason.MAX_TURNS}


def episode(start: int, states: str, rewards: Sequence[float], end: dict[str, Any] = DONE) -> MeasuredEpisode:
    """An episode with a letter for each state; each action is "open"."""
    turns = [
        turn(index=place, observation=state, env_reward=reward, **(end if place == len(states) - 1 else {}))
        for place, (state, reward) in enumerate(zip(states, rewards, strict=True))
    ]
    return MeasuredEpisode(start, tuple(turns), tuple(range(1, len(turns) + 1)))


def test_all_facts_of_five_episodes() -> None:
    played = [
        episode(0, "abc", (0, 0, 1)),
        episode(0, "abdb", (0, 0, 0, 0), LIMIT),
        episode(1, "xy", (0, 0)),
        episode(1, "xz", (0.5, -0.5)),
        episode(2, "p", (2,)),
    ]
    facts = measure(played, iteration_turns=64, lost=1, repeats=[True, True, False])
    assert (facts.episodes, facts.starts, facts.shared_starts, facts.turns, facts.lost) == (5, 3, 2, 12, 1)
    assert facts.horizon == (2, 4)
    assert facts.reply_tokens == (2, 3)  # 1 1 1 1 1 2 2 2 2 3 3 4
    assert facts.cut.value == 1 / 5
    assert facts.begin_alike.value == 1
    assert facts.met_in_others.value == 3 / 7  # b b b of b c, b d b, y, z
    assert facts.met_again.value == 1 / 7
    assert facts.mean_return == pytest.approx(3 / 5)
    assert facts.above_least.value == 2 / 5
    assert facts.mixed.value == 1 / 2
    assert (facts.between, facts.within) == pytest.approx((max(0.125 - 0.125, 0), 0.25))
    assert facts.rewarded.value == 4 / 12
    assert facts.told_apart.value == 4 / 12
    assert facts.on_the_way.value == 1 / 4
    assert facts.repeats.value == 2 / 3
    assert facts.uncertain.value == 2 / 3  # of "a" (to b), "b" (to c, d) and "x" (to y for 0, to z for 0.5)
    assert math.isnan(facts.explained.value)
    assert facts.mean_turns == 12 / 5


def test_rewards_to_go_are_those_of_the_environment_and_its_judge() -> None:
    one = episode(0, "abc", (1, 2, 4))
    judged = replace(
        one, turns=(replace(one.turns[0], reward=-9.0, metrics={"judge": 0.5, "other": 7.0}), *one.turns[1:])
    )
    assert judged.rewards == [1.5, 2, 4]
    assert judged.returns_to_go(0.5) == [1.5 + 0.5 * 2 + 0.25 * 4, 2 + 0.5 * 4, 4]


def test_a_cost_of_every_turn_tells_nothing_and_penalties_are_no_rewards() -> None:
    costly = MeasuredEpisode(0, tuple(turn(env_reward=-0.1, reward=-0.2, **end) for end in ({}, {}, DONE)), (1, 1, 1))
    facts = measure([costly, costly], iteration_turns=8)
    assert (facts.rewarded.value, facts.told_apart.value) == (1, 0)
    assert facts.mean_return == pytest.approx(-0.3)
    assert math.isnan(facts.on_the_way.value)
    judged = MeasuredEpisode(0, (turn(metrics={"judge": 0.5}, **DONE),), (1,))
    assert measure([judged], iteration_turns=8).mean_return == 0.5


def test_episodes_that_were_left_have_not_ended() -> None:
    facts = measure([episode(0, "ab", (0, 0), {}), episode(0, "ab", (0, 1))], iteration_turns=8)
    assert (facts.unended, facts.cut.value) == (1, 0)  # no limit ended the one that is no longer watched
    invalid = {"truncated": True, "stop": StopReason.INVALID_ACTION}
    facts = measure([episode(0, "ab", (0, 0), end) for end in (invalid, LIMIT, DONE, DONE)], iteration_turns=8)
    assert (facts.unended, facts.cut.value) == (0, 0.25)
    with pytest.raises(ValueError, match="without an episode"):
        measure([], iteration_turns=8)


def test_a_state_in_which_a_reply_is_asked_for_again_is_not_met_again() -> None:
    plain = [episode(0, states, (0, 0, 0)) for states in ("abc", "abd")]
    asked = [replace(turn(observation=state, action=""), asked_again=True) for state in "aab"]
    with_asked = [replace(one, turns=(*asked, *one.turns), reply_tokens=(1,) * 6) for one in plain]
    for name in ("met_again", "met_in_others"):
        one, other = (getattr(measure(each, iteration_turns=8), name) for each in (plain, with_asked))
        assert one.value == other.value == {"met_again": 0, "met_in_others": 0.5}[name]


def test_shares_by_hand() -> None:
    assert middle_and_most([4, 1, 2, 3]) == (2.5, 4)
    assert middle_and_most(range(1, 11)) == (5.5, 9)
    assert met_in_others(["abc"]) == (0, 0)  # there is no other one
    assert met_in_others(["abb", "acb", "d"]) == (3, 4)
    assert met_again(["abab", "c"]) == (2, 3)
    assert met_again(["abab", ""]) == (2, 3)  # every reply of the other one was asked for again
    assert share(0, 0).value != share(0, 0).value  # not a number
    assert share(1, 4).value == 0.25
    assert share(1, 4).low < 0.1
    assert share(1, 4).high > 0.6


def test_what_follows_a_limit_is_not_known() -> None:
    ends = [episode(0, "a", (0,)), episode(0, "a", (0,), LIMIT), episode(0, "a", (1,))]
    assert uncertain([one.turns for one in ends]) == (1, 1)
    assert uncertain([one.turns for one in ends[:2]]) == (0, 0)


def test_variances_by_hand() -> None:
    assert variances([[0, 0], [1, 1]]) == (0.5, 0)
    between, within = variances([[0, 2], [4, 6], [9]])  # one alone tells nothing
    assert (between, within) == (8 - 1, 2)
    assert math.isnan(variances([[1.0], [2.0]])[1])
    assert variances([[1.0, 3.0]])[1] == 2


def test_a_ratio_has_an_interval_only_with_enough_starts() -> None:
    assert math.isnan(ratio([(1, 2)] * 3).low)
    assert ratio([(1, 2)] * 8) == Measured(0.5, 0.5, 0.5)
    spread = ratio([(0, 2), (2, 2)] * 10)
    assert 0.2 < spread.low < 0.5 < spread.high < 0.8
    assert ratio([(0, 2), (2, 2)] * 10) == spread  # drawn alike


def test_starts_that_tell_nothing_make_no_interval_narrower():
    """Of 20 starts one had a reward: what is known of it is what one start tells."""
    assert math.isnan(ratio([(3, 4)] + [(0, 0)] * 19).low)
    assert ratio([(1, 4), (3, 4), (2, 4), (0, 4)] + [(0, 0)] * 40) == ratio([(1, 4), (3, 4), (2, 4), (0, 4)])
    assert math.isnan(ratio([(0, 0)] * 8).value)
    assert math.isnan(ratio([]).value)


def test_the_interval_of_a_ratio_holds_the_truth_about_as_often_as_it_says() -> None:
    """Of few starts that differ; without widening it held it in 86 % of the cases."""
    rng, held = np.random.default_rng(0), 0
    for _ in range(600):
        turns_S = rng.integers(20, 60, 8)
        counted_S = rng.binomial(turns_S, rng.beta(2, 2, 8))
        found = ratio(list(zip(counted_S.tolist(), turns_S.tolist(), strict=True)))
        held += found.low <= 0.5 <= found.high
    assert 0.91 < held / 600 < 0.97


def test_what_all_starts_agree_in_is_not_certain():
    """Of 8 starts without a reward the share may still be a third, where one start in three has any."""
    assert share_of_turns([(0, 30)] * 8) == share(0, 8)
    assert share_of_turns([(5, 5)] * 8 + [(0, 0)] * 3) == share(8, 8)
    assert share(0, 8).high == pytest.approx(0.324, abs=1e-3)
    assert math.isnan(share_of_turns([(0, 30)] * 3).low)
    assert share_of_turns([(1, 2)] * 8) == ratio([(1, 2)] * 8)
    rng, held = np.random.default_rng(0), 0
    for _ in range(600):
        some_S = (rng.random(8) < 0.15) * 20  # of 20 turns of each start: all or none
        found = share_of_turns([(some, 20) for some in some_S.tolist()])
        held += found.low <= 0.15 <= found.high
    assert held / 600 > 0.94  # 0.76 with a bootstrap alone


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (7, 2.365), (12, 2.179), (100, 1.984)])
def test_quantiles_of_students_t(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=0.01 if freedom == 3 else 1e-3)


def test_ridge_by_hand() -> None:
    """Features -1 and 1 with returns 0 and 2: standardised as they are, the weight is 2 / (2 + penalty)."""
    x_NH = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    y_N = torch.tensor([0.0, 2.0], dtype=torch.float64)
    values_PM = ridge(x_NH, y_N, torch.tensor([[1.0], [3.0]], dtype=torch.float64), (2.0, 1e-9))
    assert torch.allclose(values_PM, torch.tensor([[1.5, 2.5], [2.0, 4.0]], dtype=torch.float64))


def test_ridge_is_the_least_squared_error_with_a_penalty_on_squared_weights() -> None:
    """The definition, in features; fewer states than features, and more."""
    torch.manual_seed(0)
    for count in (3, 12):
        x_NH, y_N, others_MH = (torch.randn(*size, dtype=torch.float64) for size in ((count, 5), (count,), (4, 5)))
        mean_H, scale_H = x_NH.mean(0), x_NH.std(0, correction=0) * 5**0.5
        z_NH, z_MH = (x_NH - mean_H) / scale_H, (others_MH - mean_H) / scale_H
        for penalty in (0.001, 1.0):
            weights_H = torch.linalg.solve(z_NH.T @ z_NH + penalty * torch.eye(5).double(), z_NH.T @ (y_N - y_N.mean()))
            values_PM = ridge(x_NH, y_N, others_MH, (penalty,))
            torch.testing.assert_close(values_PM, (z_MH @ weights_H + y_N.mean())[None], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("unit", "origin"), [(1e-4, 0.0), (1e3, 0.0), (1.0, 50.0)])
def test_values_of_a_ridge_regression_do_not_depend_on_the_units_of_features(unit: float, origin: float) -> None:
    """Nor on a feature that is the same everywhere, but for the share of the penalty that each of them has."""
    torch.manual_seed(0)
    x_NH, y_N, others_MH = (torch.randn(*size, dtype=torch.float64) for size in ((9, 3), (9,), (4, 3)))
    want = ridge(x_NH, y_N, others_MH, (0.1, 1.0))
    torch.testing.assert_close(ridge(unit * x_NH + origin, y_N, unit * others_MH + origin, (0.1, 1.0)), want)
    same = [torch.cat([x, torch.full((len(x), 1), 7.0, dtype=torch.float64)], 1) for x in (x_NH, others_MH)]
    torch.testing.assert_close(ridge(same[0], y_N, same[1], (0.1 * 3 / 4, 1.0 * 3 / 4)), want)


def test_the_quick_critic_explains_what_states_tell_and_nothing_of_noise() -> None:
    torch.manual_seed(0)
    starts = [number // 5 for number in range(100)]
    states_NH, noise_N = torch.randn(100, 3), torch.randn(100)
    explained = explained_variance(states_NH, states_NH @ torch.tensor([1.0, -2.0, 0.0]), starts)
    assert explained.value > 0.99
    half = explained_variance(states_NH, states_NH[:, 0] + noise_N, starts)
    assert 0 < half.low < half.value < half.high < 0.8
    assert abs(explained_variance(states_NH, noise_N, starts).value) < 0.2
    own = torch.eye(20)[torch.tensor(starts)]  # a return that only the start tells says nothing of new starts
    assert explained_variance(own, torch.randn(20)[torch.tensor(starts)], starts).value <= 0
    assert math.isnan(explained_variance(states_NH, torch.ones(100), starts).value)
    assert math.isnan(explained_variance(states_NH, noise_N, [0] * 100).value)
