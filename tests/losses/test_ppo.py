from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_agentrl.losses import PPOClip, clip_fractions, ppo_clip_loss

NAN = float("nan")
f64 = partial(torch.tensor, dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)

SETTINGS = [
    {},
    {"clip_low": 0.2, "clip_high": 0.28},
    {"clip_low": 1.0, "clip_high": 0.1, "dual_clip": None},
    {"clip_low": 0.3, "clip_high": 1.5, "dual_clip": 1.1},  # the dual clip bites inside the ratio's upper bound
    {"dual_clip": None},
]


def by_definition(
    logp: float, old: float, a: float, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = 3.0
) -> tuple[float, str | None]:
    """Loss of one token, and which clip holds it where it is: "ratio", "dual" or None."""
    rho = math.exp(min(max(logp - old, -20.0), 20.0))
    if a >= 0:  # good token: no reward for a ratio beyond the upper bound
        return (-a * (1 + clip_high), "ratio") if a and rho > 1 + clip_high else (-a * rho, None)
    if rho < 1 - clip_low:  # bad token: no reward for a ratio below the lower bound
        return -a * (1 - clip_low), "ratio"
    if dual_clip is not None and rho > dual_clip:
        return -a * dual_clip, "dual"
    return -a * rho, None


def random_tokens(seed: int, shape: tuple[int, ...] = (4, 9), spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logps, old, advantages = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    advantages[torch.rand(shape, generator=generator) < 0.2] = 0.0
    return spread * logps, spread * old, advantages


@pytest.mark.parametrize("kwargs", SETTINGS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0, 20.0]))
def test_equals_the_definition(kwargs, seed, spread):
    logps, old, advantages = random_tokens(seed, spread=spread)
    loss = ppo_clip_loss(logps, old, advantages, **kwargs)
    tokens = zip(*(x.flatten().tolist() for x in (logps, old, advantages)), strict=True)
    want = [by_definition(*token, **kwargs)[0] for token in tokens]
    close(loss.flatten(), f64(want))
    assert torch.equal(PPOClip(**kwargs)(logps, old, advantages, torch.ones(logps.shape)), loss)


def test_hand_computed_numbers():
    ratio = f64([1.5, 1.5, 0.5, 0.5, 4.0, 4.0, 1.1, 0.9])
    advantage = f64([2.0, -2.0, 2.0, -2.0, 1.0, -1.0, -1.0, 1.0])
    loss = ppo_clip_loss(ratio.log(), torch.zeros_like(ratio), advantage)
    close(loss, f64([-2.4, 3.0, -1.0, 1.6, -1.2, 3.0, 1.1, -0.9]))


def test_extreme_log_ratios_stay_finite():
    logps = torch.tensor([500.0, -500.0], requires_grad=True)
    for sign in (1.0, -1.0):
        loss = ppo_clip_loss(logps, torch.zeros(2), torch.full((2,), sign), dual_clip=None)
        (gradient,) = torch.autograd.grad(loss.sum(), logps)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
    assert float(loss[0].detach()) == pytest.approx(math.exp(20), rel=1e-6)


@pytest.mark.parametrize("kwargs", SETTINGS)
def test_gradcheck(kwargs):
    logps, old, advantages = random_tokens(3)
    logps.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: ppo_clip_loss(x, old, advantages, **kwargs), (logps,))


@pytest.mark.parametrize("kwargs", SETTINGS)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_gradient_is_gone_exactly_where_the_metrics_say(kwargs, seed):
    logps, old, advantages = random_tokens(seed, shape=(6, 11))
    advantages[advantages == 0] = 0.5  # without an advantage there is no gradient and no clip either
    logps.requires_grad_(True)
    (gradient,) = torch.autograd.grad(ppo_clip_loss(logps, old, advantages, **kwargs).sum(), logps)
    metrics = PPOClip(**kwargs).metrics(logps, old, advantages, torch.ones(logps.shape))
    says = torch.zeros_like(logps, dtype=torch.bool)
    for fraction in metrics.values():
        assert not fraction.requires_grad
        assert not (says & fraction.bool()).any()  # no token counts twice
        says |= fraction.bool()
    assert torch.equal(gradient == 0, says)


@pytest.mark.parametrize("kwargs", SETTINGS)
def test_each_metric_counts_its_own_clip(kwargs):
    logps, old, advantages = random_tokens(11, shape=(30, 30))
    tokens = zip(*(x.flatten().tolist() for x in (logps, old, advantages)), strict=True)
    clips = [by_definition(*token, **kwargs)[1] for token in tokens]
    loss = PPOClip(**kwargs)
    metrics = loss.metrics(logps, old, advantages, torch.ones(logps.shape))
    assert set(metrics) == {"clip_fraction"} | ({"dual_clip_fraction"} if kwargs.get("dual_clip", 3.0) else set())
    assert metrics["clip_fraction"].flatten().tolist() == [clip == "ratio" for clip in clips]
    assert "ratio" in clips
    if "dual_clip_fraction" in metrics:
        assert metrics["dual_clip_fraction"].flatten().tolist() == [clip == "dual" for clip in clips]
        assert "dual" in clips
    both = clip_fractions(logps, old, advantages, loss.clip_low, loss.clip_high, loss.dual_clip)
    assert torch.equal(both[0].float(), metrics["clip_fraction"])


def test_tokens_without_advantage_are_not_counted_as_clipped():
    logps = torch.tensor([3.0, -3.0])
    for fraction in PPOClip().metrics(logps, torch.zeros(2), torch.zeros(2), torch.ones(2)).values():
        assert torch.equal(fraction, torch.zeros(2))


def test_splitting_a_batch_gives_the_same_gradient():
    logps, old, advantages = random_tokens(7)
    whole = logps.clone().requires_grad_(True)
    parts = logps.clone().requires_grad_(True)
    ppo_clip_loss(whole, old, advantages).sum().backward()
    for rows in (slice(0, 1), slice(1, 4)):
        ppo_clip_loss(parts[rows], old[rows], advantages[rows]).sum().backward()
    assert torch.equal(whole.grad, parts.grad)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"clip_low": 0.0}, "0 < clip_low <= 1"),
        ({"clip_low": 1.2}, "0 < clip_low <= 1"),
        ({"clip_low": NAN}, "0 < clip_low <= 1"),
        ({"clip_high": 0.0}, "clip_high > 0"),
        ({"clip_high": NAN}, "clip_high > 0"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1, got 1.0"),
        ({"dual_clip": NAN}, "dual_clip must be above 1"),
    ],
)
def test_settings_outside_their_range_are_refused(kwargs, match):
    with pytest.raises(ValueError, match=f"^PPOClip: .*{match}"):
        PPOClip(**kwargs)
