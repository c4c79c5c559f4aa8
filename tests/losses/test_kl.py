from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from lightning_agentrl.losses import AdaptiveKL, FixedKL, KLCoefficient, kl_estimate, kl_loss

f64 = partial(torch.tensor, dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("k1", [0.5, -0.5, 0.0]),
        ("abs", [0.5, 0.5, 0.0]),
        ("k2", [0.125, 0.125, 0.0]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, 0.0]),
    ],
)
def test_numbers(kind, want):
    logps, ref = f64([-1.0, -2.0, -3.0]), f64([-1.5, -1.5, -3.0])
    close(kl_estimate(logps, ref, kind), f64(want))


def test_k1_is_the_default():
    assert float(kl_estimate(f64(-1.0), f64(-3.0))) == 2.0


@pytest.mark.parametrize(("d", "want"), [(-1000.0, 10.0), (-3.0, 10.0), (1000.0, 10.0), (2.0, math.exp(-2) + 1)])
def test_k3_is_bounded(d, want):
    for dtype in (torch.float32, torch.float64):
        logps = torch.tensor([d], dtype=dtype, requires_grad=True)
        k3 = kl_estimate(logps, torch.zeros(1, dtype=dtype), "k3")
        assert float(k3.detach()) == pytest.approx(want, rel=1e-6)
        k3.backward()
        assert logps.grad is not None
        assert logps.grad.isfinite().all()


def test_k3_of_nearly_equal_policies_keeps_its_digits_in_float32():
    d = torch.linspace(-1e-3, 1e-3, 41)
    k3, want = kl_estimate(d, torch.zeros(41), "k3"), d.double().square() / 2 - d.double() ** 3 / 6
    torch.testing.assert_close(k3.double(), want, rtol=1e-3, atol=1e-10)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradcheck(kind):
    logps, ref = torch.randn(2, 3, 4, dtype=torch.float64)
    logps.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), (logps,))


def test_k1_and_k3_have_the_right_mean_and_k2_the_right_gradient():
    """Over a small vocabulary everything can be summed up exactly."""
    logits = f64([0.3, -1.0, 0.9, 0.1]).requires_grad_(True)
    policy, ref = logits.log_softmax(0), f64([1.0, 0.2, -0.4, 0.0]).log_softmax(0)
    probabilities, kl = policy.exp().detach(), (policy.exp() * (policy - ref)).sum()
    for kind in ("k1", "k3"):
        close((probabilities * kl_estimate(policy, ref, kind)).sum(), kl)
    (want,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (got,) = torch.autograd.grad((probabilities * kl_estimate(policy, ref, "k2")).sum(), logits)
    close(got, want)


def test_bf16_is_computed_in_float32():
    logps, ref = torch.tensor([-1.0078125]).bfloat16(), torch.tensor([-20.0]).bfloat16()
    kl = kl_estimate(logps, ref)
    assert kl.dtype == torch.float32
    assert float(kl) == 18.9921875


def test_unknown_kinds_and_other_shapes_are_refused():
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match=r"\[2, 1\].*ref_logps.*\[2\]"):
        kl_estimate(torch.zeros(2, 1), torch.zeros(2))


# As a loss


@pytest.mark.parametrize(("kind", "value"), [("k1", 0.5), ("k3", math.exp(-0.5) - 0.5), ("k2", 0.125)])
def test_loss_is_the_estimate_times_the_ratio_to_the_policy_that_sampled(kind, value):
    logps, old, ref = f64([-1.0]), f64([-1.2]), f64([-1.5])
    close(kl_loss(logps, old, ref, kind), f64([math.exp(0.2) * value]))
    if kind != "k2":
        close(kl_loss(logps, old, ref, f"{kind}+"), f64([math.exp(0.2) * value]))


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_straight_through_kinds_have_the_gradient_of_the_kl_also_off_policy(kind):
    """Summed over a small vocabulary, with tokens sampled by an older policy."""
    logits = f64([0.3, -1.0, 0.9, 0.1]).requires_grad_(True)
    policy, ref = logits.log_softmax(0), f64([1.0, 0.2, -0.4, 0.0]).log_softmax(0)
    old = f64([0.0, 0.5, 0.2, -0.7]).log_softmax(0)
    kl = (policy.exp() * (policy - ref)).sum()
    (want,) = torch.autograd.grad(kl, logits, retain_graph=True)
    loss = (old.exp() * kl_loss(policy, old, ref, kind)).sum()
    (got,) = torch.autograd.grad(loss, logits)
    close(got, want)
    if kind != "k2":
        close(loss.detach(), kl.detach())


def test_only_the_current_policy_gets_a_gradient():
    logps, old, ref = (torch.randn(3, dtype=torch.float64).requires_grad_(True) for _ in range(3))
    kl_loss(logps, old, ref).sum().backward()
    assert old.grad is None
    assert ref.grad is None
    assert logps.grad is not None


def test_unknown_kinds_of_the_loss_are_refused():
    with pytest.raises(ValueError, match=r"'k2\+'"):
        kl_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), "k2+")


# Coefficients


@pytest.mark.parametrize(
    ("kl", "turns", "factor"),
    [
        (0.1, 500, 1.0),
        (0.11, 1000, 1.01),  # 10 % above the target, for a tenth of the horizon
        (0.09, 1000, 0.99),
        (9.0, 1000, 1.02),  # errors count up to 20 %
        (-9.0, 1000, 0.98),
        (math.inf, 1000, 1.02),
        (9.0, 2000, 1.04),
        (9.0, 0, 1.0),
    ],
)
def test_adaptive_coefficient_follows_the_kl(kl, turns, factor):
    coefficient = AdaptiveKL(value=0.5, target=0.1, horizon=10_000)
    coefficient.update(kl, turns)
    assert coefficient.value == pytest.approx(0.5 * factor, rel=1e-12)


def test_adaptive_coefficient_finds_the_target():
    """A world in which the KL is inversely proportional to the coefficient: 0.1 at 0.03."""
    coefficient = AdaptiveKL(value=0.001, target=0.1, horizon=1000)
    for _ in range(2000):
        coefficient.update(0.003 / coefficient.value, 256)
    assert coefficient.value == pytest.approx(0.03, rel=1e-6)


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 0.5), (9.0, 1.5)])
def test_one_update_changes_the_coefficient_by_half_at_most(kl, factor):
    """With so many turns as groups of long episodes may have, it would be negative."""
    for turns in (250, 499, 500, 10**9):
        coefficient = AdaptiveKL(value=0.5, horizon=100)
        coefficient.update(kl, turns)
        assert coefficient.value == 0.5 * factor
    with pytest.raises(ValueError, match=r"500 turns per update need a horizon above 100, got 100"):
        AdaptiveKL(horizon=100).check_turns(500)  # of every iteration, where their number is fixed


def test_a_kl_of_nan_is_refused_and_leaves_the_coefficient():
    coefficient = AdaptiveKL(value=0.5)
    with pytest.raises(ValueError, match="NaN"):
        coefficient.update(float("nan"), 10)
    assert coefficient.value == 0.5


def test_adaptive_state_round_trip():
    old, new, never_saved = AdaptiveKL(), AdaptiveKL(value=7.0), AdaptiveKL()
    old.update(5.0, 1000)
    new.load_state_dict(old.state_dict())
    for coefficient in (old, new):
        coefficient.update(0.0, 700)
    assert new.value == old.value
    assert new.value != never_saved.value
    assert all(isinstance(x, float) for x in old.state_dict().values())


def test_fixed_coefficient_is_what_the_configuration_says():
    coefficient: KLCoefficient = FixedKL(0.01)
    coefficient.update(100.0, 10_000)
    coefficient.load_state_dict(FixedKL(0.5).state_dict())
    assert coefficient.value == 0.01
    assert FixedKL(0).value == 0.0


def test_a_run_that_changes_its_kind_of_coefficient_can_resume():
    adaptive, fixed = AdaptiveKL(0.3), FixedKL(0.2)
    adaptive.load_state_dict(fixed.state_dict())
    assert adaptive.value == 0.2
    fixed.load_state_dict(AdaptiveKL(0.7).state_dict())
    assert fixed.value == 0.2


@pytest.mark.parametrize("value", [-0.1, float("nan"), math.inf])
def test_fixed_coefficient_outside_its_range_is_refused(value):
    with pytest.raises(ValueError, match=r"^FixedKL: value"):
        FixedKL(value)


@pytest.mark.parametrize("name", ["value", "target", "horizon", "clip"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), math.inf])
def test_adaptive_settings_outside_their_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"AdaptiveKL.*{name}.*0.*{value}"):
        AdaptiveKL(**{name: value})
