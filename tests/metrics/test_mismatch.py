"""How far engine and trainer are apart, and what a correction makes of it: `mismatch/*`."""

from __future__ import annotations

from dataclasses import replace
from math import e, exp, inf, log, nan

import pytest
import torch

from lightning_agentrl.agents.metrics_of_run import describe
from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.metrics.mismatch import (
    EXACT,
    MOST_LARGEST,
    MOST_MEAN,
    ROUGH,
    Bounds,
    Comparison,
    bounds_for,
)
from lightning_agentrl.metrics.rollout import mismatch_numbers, staleness, staleness_numbers
from lightning_agentrl.types import Rollout, Scores
from tests.metrics.rollouts import by_hand
from tests.types.samples import turn

# Log-ratios trainer to engine, sample by sample:
#   A 0 1 -1    B 1 0    C 0    D 0 0 -1 0 -2    E 0 1    F, G, H 0 -1, 0 0 0, -1 1
EXPECTED = {
    # the distance, so that differences of both signs do not cancel
    "mismatch/logp_gap_mean": (2 + 1 + 0 + 3 + 1 + 3) / 20,
    "mismatch/logp_gap_max": 2,
    "mismatch/kl": (0 - 1 + 0 + 3 - 1 + 1) / 20,
    "mismatch/k3": (4 * (e - 2) + 4 / e + (e**-2 + 1)) / 20,  # 1 four times, -1 four times, -2 once
    "mismatch/chi2_token": (11 + 4 * e**2 + 4 * e**-2 + e**-4) / 20 - 1,
    "mismatch/chi2_sample": (1 + e**2 + 1 + e**-6 + e**2 + e**-2) / 6 - 1,  # sums 0, 1, 0, -3, 1, -1
    "mismatch/perplexity_train": (exp(4 / 3) + exp(2) + exp(2) + exp(8 / 5) + exp(3 / 2) + exp(11 / 7)) / 6,
    "mismatch/perplexity_engine": (exp(4 / 3) + exp(5 / 2) + exp(2) + exp(1) + exp(2) + exp(10 / 7)) / 6,
    "mismatch/perplexity_ratio": (1 + exp(-1 / 2) + 1 + exp(3 / 5) + exp(-1 / 2) + exp(1 / 7)) / 6,
}
# Samples B and D are rejected, 7 of 20 tokens; weights are 1 but for A, where they are 0, 2 and 4
OF_CORRECTION = {
    "mismatch/rejected": 7 / 20,
    "mismatch/weight": (0 + 2 + 4 + 10) / 13,
    "mismatch/ess": (6 + 10) ** 2 / (20 * (4 + 16 + 10)),
}
# Five turns of the versions 9, 8, 8, 6, 4, trained from version 10 on, 4 steps in an iteration
OF_STALENESS = {
    "mismatch/staleness_mean": (1 + 2 + 2 + 4 + 6) / 4 / 5,
    "mismatch/staleness_max": 6 / 4,
}


def computed(rollout: Rollout) -> dict[str, float]:
    return over_ranks(mismatch_numbers(rollout))


def corrected() -> Rollout:
    rollout = by_hand()
    weights = rollout.action_mask.double()
    weights[0, :3] = torch.tensor([0.0, 2.0, 4.0])
    keep = rollout.action_mask & ~torch.tensor([0, 1, 0, 1, 0, 0], dtype=torch.bool)[:, None]
    return rollout.union(weights=weights, loss_mask=keep)


def test_every_number_by_hand():
    assert computed(by_hand()) == pytest.approx(EXPECTED, rel=1e-12)


def test_ratios_are_bounded_as_those_of_tokens_and_of_samples():
    """All tokens are e^15 or e^30 times as likely for the trainer; only C has one token alone."""
    for gap, bounded, alone in ((15.0, 15.0, 15.0), (30.0, 20.0, 20.0)):
        rollout = by_hand()
        numbers = computed(replace(rollout, scores=Scores(old_logps=rollout.rollout_logps + gap)))
        assert numbers["mismatch/logp_gap_mean"] == numbers["mismatch/logp_gap_max"] == gap
        assert numbers["mismatch/kl"] == -bounded
        assert numbers["mismatch/chi2_token"] == pytest.approx(exp(2 * bounded) - 1)
        assert numbers["mismatch/chi2_sample"] == pytest.approx((5 * exp(2 * 20) + exp(2 * alone)) / 6 - 1)


def test_numbers_of_a_correction_by_hand():
    numbers = describe(corrected(), lambda x: x)
    assert {name: numbers[name] for name in OF_CORRECTION} == pytest.approx(OF_CORRECTION, rel=1e-12)
    assert {name: numbers[name] for name in EXPECTED} == pytest.approx(EXPECTED, rel=1e-12)


def test_everything_rejected():
    numbers = describe(corrected().union(loss_mask=torch.zeros_like(by_hand().action_mask)), lambda x: x)
    assert numbers["mismatch/rejected"] == 1.0
    assert numbers["mismatch/ess"] == 0.0
    assert "mismatch/weight" not in numbers


def test_what_was_not_scored_is_left_out():
    assert computed(replace(by_hand(), scores=Scores())) == {}


def test_staleness_by_hand():
    turns = [turn(policy_version=version) for version in (9, 8, 8, 6, 4)]
    numbers = over_ranks(staleness_numbers(turns, policy_version=10, steps_per_iteration=4))
    assert numbers == pytest.approx(OF_STALENESS, rel=1e-12)
    assert staleness([turn(policy_version=0)], policy_version=4, steps_per_iteration=4) == [1.0]


def test_a_rank_without_turns_has_none_that_are_old():
    assert over_ranks(staleness_numbers([], 10, 4)) == {"mismatch/staleness_max": 0.0}


@pytest.mark.parametrize(("version", "ages"), [(6, [0, 0, 0]), (10, [0, 0, 0]), (14, [1.0, 1.0, 0.5])])
def test_turns_age_only_in_steps_that_move_the_policy(version, ages):
    """Of 10 steps of a warm-up none does, nor of those of a second run, before which two steps move it."""
    turns = [turn(policy_version=min(old, version)) for old in (2, 10, 12)]
    assert staleness(turns, version, steps_per_iteration=4, held_steps=range(10)) == ages
    later = [replace(each, policy_version=each.policy_version + 6) for each in (*turns, turn(policy_version=-2))]
    assert staleness(later, version + 6, steps_per_iteration=4, held_steps=range(6, 16)) == [*ages, ages[0] + 0.5]


def compared(mismatch: list[float], bounds: Bounds = ROUGH, rounding: list[float] | None = None) -> Comparison:
    """A comparison of certain tokens, whose entropy is 0."""
    trainer = torch.zeros(len(mismatch), dtype=torch.float64)
    off = None if rounding is None else torch.tensor(rounding)
    return Comparison(torch.tensor(mismatch), trainer, trainer, bounds, off)


@pytest.mark.parametrize("bounds", [EXACT, ROUGH])
def test_the_rounding_of_a_policy_widens_bounds_and_never_narrows_them(bounds: Bounds) -> None:
    assert compared([0.0], bounds).allowed == compared([0.0], bounds, [0.0]).allowed == bounds
    wide = compared([0.0], bounds, [1.5, 0.0]).allowed
    assert (wide.mean, wide.largest) == (min(2 * 0.75, MOST_MEAN), 4.5)


@pytest.mark.parametrize("bounds", [EXACT, ROUGH])
def test_what_is_too_large_for_rounding_or_not_a_number_is_not_taken_for_it(bounds: Bounds) -> None:
    assert compared([0.0], bounds, [50.0]).allowed == Bounds(MOST_MEAN, MOST_LARGEST)
    assert compared([0.0], bounds, [inf]).allowed == compared([0.0], bounds, [nan, 0.1]).allowed == bounds


@pytest.mark.parametrize(
    ("mismatch", "fits"),
    [([0.1, 0.1], True), ([0.11, 0.11], False), ([0.8, *[0.0] * 9], True), ([0.81, *[0.0] * 9], False), ([nan], False)],
)
def test_both_the_mean_and_the_largest_mismatch_lie_within_bounds(mismatch: list[float], fits: bool) -> None:
    assert compared(mismatch, Bounds(0.1001, 0.8001)).fits == fits


@pytest.mark.parametrize("likeliest", [None, 1.5, 10.0, 20.0], ids=["uniform", "random", "nearly certain", "certain"])
def test_tokens_of_any_distribution_fit_if_they_are_drawn_from_it(likeliest: float | None) -> None:
    """Some are alike for all tokens, so the scale of what was drawn is rounding, or ignores what is rarely drawn."""
    logits = torch.zeros(600, 384)
    if likeliest is not None:
        logits[:, 7] = likeliest + log(384)
    log_pi = logits.double().log_softmax(-1)
    tokens = torch.multinomial(log_pi.exp(), 1, generator=torch.Generator().manual_seed(0))
    logps = log_pi.gather(-1, tokens)[:, 0]
    assert Comparison(logps, logps.float(), -(log_pi.exp() * log_pi).sum(-1), EXACT).fits
    most = log_pi.max(-1).values
    if likeliest == 1.5:  # the engine always takes the likeliest token, and reports its log-prob
        greedy = Comparison(most, most, -(log_pi.exp() * log_pi).sum(-1), EXACT)
        assert greedy.logps_fit
        assert not greedy.fits


def test_bounds_follow_the_lower_precision() -> None:
    assert bounds_for("auto", "torch.float32") == bounds_for("float32", "torch.float64") == EXACT
    assert bounds_for("bfloat16", "torch.float32") == bounds_for("auto", "torch.bfloat16") == ROUGH
    assert bounds_for("float16", "torch.float32") == ROUGH
