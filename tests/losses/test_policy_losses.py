"""What is particular to a policy loss; what all of them share is in test_conformance.py, PPO in test_ppo.py."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from lightning_agentrl.losses import (
    CISPO,
    DPPOKL,
    DPPOTV,
    DRO,
    GMPO,
    GSPO,
    SAPO,
    AdaptiveKL,
    ClipCov,
    IcePop,
    KeepCovering,
    KeepWidest,
    KLCov,
    PPOClip,
    RatioRejection,
    Reinforce,
    TruncatedWeights,
    cispo_loss,
    dppo_loss,
    gmpo_loss,
    gspo_loss,
    kl_shift,
    largest,
    ppo_clip_loss,
    sapo_loss,
    tv_shift,
)
from tests.losses import definitions
from tests.losses.ranks import on_ranks
from tests.losses.test_conformance import Case
from tests.same_defaults import assert_same_defaults

f64 = partial(torch.tensor, dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
ONE_ROW = torch.ones(1, 2, dtype=torch.bool)


def gradient(loss, logps, old, advantages, mask):
    logps = logps.clone().requires_grad_(True)
    loss(logps, old, advantages, mask).sum().backward()
    return logps.grad


def test_gspo_ratio_is_the_geometric_mean_of_the_row():
    """Ratios 4 and 0.25: tokens that PPO clips cancel, and both have the gradient of a ratio of 1."""
    logps, old = f64([[4.0, 0.25]]).log() - 3, f64([[-3.0, -3.0]])
    advantages = f64([[2.0, 2.0]])
    close(GSPO()(logps, old, advantages, ONE_ROW), -advantages)
    close(gradient(GSPO(), logps, old, advantages, ONE_ROW), -advantages)


def test_gspo_clips_whole_rows_in_the_fourth_digit():
    old, advantages = f64([[-1.0, -1.0]]), f64([[1.0, 1.0]])
    inside, outside = old + math.log(1 + 3.9e-4), old + math.log(1 + 4.1e-4)
    assert gradient(GSPO(), inside, old, advantages, ONE_ROW).all()
    assert not gradient(GSPO(), outside, old, advantages, ONE_ROW).any()
    assert GSPO().metrics(outside, old, advantages, ONE_ROW)["clip_fraction"].tolist() == [[1.0, 1.0]]
    for change, sign, clipped in ((-3.1e-4, -1, 1), (-2.9e-4, -1, 0), (3.9e-4, 1, 0)):
        row = old + math.log(1 + change), old, sign * advantages, ONE_ROW
        assert GSPO().metrics(*row)["clip_fraction"].tolist() == [[clipped] * 2]
        assert gradient(GSPO(), *row).eq(0).tolist() == [[bool(clipped)] * 2]


def test_gmpo_row_by_hand():
    """Log-ratios 1 and -0.2, positive advantages: the first counts as 0.4, so the row is -A exp(0.1)."""
    old, advantages = f64([[-2.0, -2.0]]), f64([[3.0, 1.0]])
    logps = old + f64([[1.0, -0.2]])
    close(GMPO()(logps, old, advantages, ONE_ROW), f64([[-2 * math.exp(0.1)] * 2]))
    assert gradient(GMPO(), logps, old, advantages, ONE_ROW).ne(0).tolist() == [[False, True]]
    assert GMPO().metrics(logps, old, advantages, ONE_ROW)["clip_fraction"].tolist() == [[1.0, 0.0]]
    worse = old - 1.0  # pushed down far enough: a negative advantage has no more say
    assert not gradient(GMPO(), worse, old, -advantages, ONE_ROW).any()


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    old, advantages = f64([[-3.0, -3.0]]), f64([[1.0, 1.0]])
    logps = old + f64([[5.0, 0.01]]).log()
    close(gradient(CISPO(), logps, old, advantages, ONE_ROW), f64([[-1.28, -0.01]]))  # no lower bound
    close(gradient(CISPO(clip_low=0.2), logps, old, advantages, ONE_ROW), f64([[-1.28, -0.8]]))
    assert CISPO().metrics(logps, old, advantages, ONE_ROW)["clip_fraction"].tolist() == [[1.0, 0.0]]


def test_cispo_marks_the_tokens_whose_weight_is_not_their_ratio():
    case, loss = Case(0), CISPO(clip_low=0.2, clip_high=0.3)
    columns = case.logps, case.old, case.advantages, case.mask
    weights, ratios = gradient(loss, *columns) / -case.advantages, (case.logps - case.old).exp()
    clipped = ~torch.isclose(weights, ratios) & case.mask
    assert torch.equal(loss.metrics(*columns)["clip_fraction"].bool() & case.mask, clipped)
    assert {round(float(weight), 9) for weight in weights[clipped]} == {0.8, 1.3}


def test_cispo_without_bounds_is_reinforce_with_importance_weights():
    case = Case(0)
    got = CISPO(clip_high=math.inf)(case.logps, case.old, case.advantages, case.mask)
    weight = (case.logps - case.old).exp()
    close(got, torch.where(case.mask, weight * Reinforce()(case.logps, case.old, case.advantages, case.mask), 0))


@pytest.mark.parametrize("loss", [PPOClip(), CISPO(), SAPO(), DPPOTV(), DPPOKL(), Reinforce(), DRO(0.5)])
def test_at_equal_policies_the_gradient_is_that_of_reinforce(loss):
    case = Case(0)
    got = gradient(loss, case.logps, case.logps, case.advantages, case.mask)
    close(got, torch.where(case.mask, -case.advantages, 0))


def test_sapo_closes_on_both_sides_and_sooner_for_negative_advantages():
    old = f64([[-3.0, -3.0]])
    for ratio in (0.2, 5.0):
        logps = old + math.log(ratio)
        good, bad = gradient(SAPO(), logps, old, f64([[1.0, -1.0]]), ONE_ROW).abs()[0] / ratio
        assert bad < good < 1


def test_sapo_at_equal_policies_by_hand():
    old = f64([[-3.0, -3.0]])
    close(SAPO(0.5, 0.8)(old, old, f64([[1.0, -1.0]]), ONE_ROW), f64([[-2 / 0.5, 2 / 0.8]]))


def test_dppo_leaves_out_by_probability_and_not_by_ratio():
    """A rare token may grow fourfold; a common one may not lose a fifth of the mass."""
    old, logps = f64([[0.01, 0.9]]).log(), f64([[0.04, 0.7]]).log()
    for loss in (DPPOTV(), DPPOKL()):
        for advantage, want in ((f64([[1.0, -1.0]]), [[0.0, 1.0]]), (f64([[-1.0, 1.0]]), [[0.0, 0.0]])):
            assert loss.metrics(logps, old, advantage, ONE_ROW)["clip_fraction"].tolist() == want
            assert gradient(loss, logps, old, advantage, ONE_ROW).eq(0).double().tolist() == want


def test_dppo_has_a_limit_for_each_direction():
    """Both tokens move by 0.2, which is 0.081 nats."""
    old, logps, advantages = f64([[0.4, 0.6]]).log(), f64([[0.6, 0.4]]).log(), f64([[1.0, -1.0]])
    for cls, limits in ((DPPOTV, (0.1, 0.3)), (DPPOKL, (0.05, 0.3))):
        for low, high, want in ((*limits, [[0.0, 1.0]]), (*limits[::-1], [[1.0, 0.0]])):
            loss = cls(limit_low=low, limit_high=high)
            assert loss.metrics(logps, old, advantages, ONE_ROW)["clip_fraction"].tolist() == want
            assert gradient(loss, logps, old, advantages, ONE_ROW).eq(0).double().tolist() == want
            assert not loss.metrics(logps, old, 0 * advantages, ONE_ROW)["clip_fraction"].any()  # has no direction


def test_dppo_bounds_the_weight():
    old, logps, advantages = f64([[1e-4, 1e-4]]).log(), f64([[1e-2, 1e-3]]).log(), f64([[1.0, 1.0]])
    close(gradient(DPPOTV(), logps, old, advantages, ONE_ROW), f64([[-20.0, -10.0]]))
    close(gradient(DPPOTV(max_ratio=1.0), logps, old, advantages, ONE_ROW), f64([[-1.0, -1.0]]))


def test_shifts_by_hand():
    pi, mu = f64([0.5, 0.2, 1.0, 1.0]), f64([0.2, 0.5, 1.0, 0.5])
    close(tv_shift(pi.log(), mu.log()), f64([0.3, 0.3, 0.0, 0.5]))
    first = 0.2 * math.log(0.4) + 0.8 * math.log(1.6)
    second = 0.5 * math.log(2.5) + 0.5 * math.log(0.625)
    close(kl_shift(pi.log(), mu.log()), f64([first, second, 0.0, math.inf]))  # the others are impossible under pi


def test_dro_by_hand():
    close(DRO(0.5)(f64([[-1.0]]), f64([[-3.0]]), f64([[2.0]]), ONE_ROW[:, :1]), f64([[2.0 + 0.25 * 4]]))


@pytest.mark.parametrize(
    ("made", "published"),
    [
        (PPOClip(), {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}),
        (GSPO(), {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}),
        (CISPO(), {"clip_low": 1.0}),  # no lower bound
        (SAPO(), {"tau_positive": 1.0, "tau_negative": 1.05}),
        (GMPO(), {"clip": 0.4, "aggregation": "seq-mean-token-mean"}),
        (DPPOTV(), {"max_ratio": 20.0}),
        (DPPOKL(), {"max_ratio": 20.0}),
        (ClipCov(), {"share": 2e-4, "cov_low": 1.0, "cov_high": 5.0}),
        (KLCov(), {"share": 2e-4, "penalty": 1.0}),
        (TruncatedWeights(), {"level": "token", "cap": 2.0}),
        (IcePop(), {"low": 0.5, "high": 5.0}),
        (KeepWidest(), {"share": 0.25}),
        (KeepCovering(), {"share": 0.9, "of": "std"}),
        (RatioRejection(), {"level": "mean", "low": 0.99, "high": 1.01}),
        (AdaptiveKL(), {"clip": 0.2}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_defaults_are_those_that_were_published(made, published):
    assert {name: getattr(made, name) for name in published} == published


@pytest.mark.parametrize(
    ("function", "cls"),
    [
        (ppo_clip_loss, PPOClip),
        (gspo_loss, GSPO),
        (gmpo_loss, GMPO),
        (cispo_loss, CISPO),
        (sapo_loss, SAPO),
        (dppo_loss, DPPOTV),
        (dppo_loss, DPPOKL),
    ],
)
def test_a_function_has_the_defaults_of_its_class(function, cls):
    assert_same_defaults(function, cls)


# Picked tokens


@pytest.mark.parametrize("loss", [ClipCov(0.1, 0.1, 5.0), ClipCov(0.3, -1.0, 0.5), ClipCov(), KLCov(0.1), KLCov()])
@pytest.mark.parametrize("seed", range(6))
def test_picked_tokens_are_those_of_the_definition(loss, seed):
    case = Case(seed)
    low, high = getattr(loss, "cov_low", 0.0), getattr(loss, "cov_high", 0.0)
    columns = (case.logps, case.old, case.advantages, case.mask, case.noise)
    name = type(loss).__name__
    want = definitions.picked_tokens(name, *(x.tolist() for x in columns), loss.share, low, high)
    assert case.picked(loss).tolist() == want


def test_one_token_at_least_is_pulled_back():
    assert int(Case(0).picked(KLCov(1e-9)).sum()) == 1


def test_tokens_that_are_clipped_already_are_not_picked():
    case, loss = Case(1), ClipCov(1.0, -100.0, 100.0)
    clipped, dual = loss.clipped(case.logps, case.old, case.advantages)
    assert (case.mask & (clipped | dual)).any()
    assert torch.equal(case.picked(loss), case.mask & ~clipped & ~dual)


def test_a_covariance_at_a_bound_is_outside():
    """Both tokens have (1 - 0)(-1 + 2) = 1."""
    logps, advantages = f64([[-1.0, -3.0]]), f64([[1.0, -1.0]])
    for low, high, want in ((0.9, 1.1, True), (1.0, 5.0, False), (0.0, 1.0, False)):
        loss = ClipCov(1.0, low, high)
        assert loss.pick(logps, logps, advantages, ONE_ROW, advantages).tolist() == [[want, want]]


def test_equal_scores_are_decided_by_the_noise_so_that_the_number_is_exact():
    scores, noise = torch.zeros(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    for count in (1, 5, 12, 20):
        assert int(largest(scores, noise, torch.ones(3, 4), count).sum()) == min(count, 12)


def test_all_candidates_on_one_rank():
    scores, noise = torch.rand(2, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    parts = on_ranks(
        lambda rank, gather: largest(*(x[rank : rank + 1] for x in (scores, noise, mask)), count=2, gather=gather)
    )
    assert torch.equal(torch.cat(parts), largest(scores, noise, mask, 2))
    assert int(parts[0].sum()) == 2


def test_kl_cov_pulls_in_both_directions():
    old, advantages = f64([[-2.0, -2.0]]), torch.zeros(1, 2, dtype=torch.float64)
    loss = KLCov(penalty=0.7)(old + f64([[0.5, -0.5]]), old, advantages, ONE_ROW, ONE_ROW)
    close(loss, f64([[0.35, 0.35]]))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: GSPO(clip_low=0.0), "^GSPO: needs 0 < clip_low"),
        (lambda: ClipCov(share=0.0), "^ClipCov: share"),
        (lambda: ClipCov(clip_low=0.0), "^ClipCov: needs 0 < clip_low"),
        (lambda: KLCov(share=1.5), "^KLCov: share"),
    ],
)
def test_settings_outside_their_range_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
