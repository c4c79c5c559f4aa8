"""The head that follows the scale of the returns: values stay as its units move, and scale changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.models.critic import LEAST_STD, PopArtHead, SharedCritic, popart_head

MEANS = st.floats(-100, 100)
STDS = st.floats(0.01, 100)


def some_head(step: float) -> PopArtHead:
    head = PopArtHead(4, step).double()
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    return head


@given(seen=st.lists(st.tuples(MEANS, STDS), min_size=1, max_size=5), step=st.floats(0.01, 1.0))
def test_values_stay_as_mean_and_scale_move(seen, step):
    head, hidden = some_head(step), torch.randn(8, 4, dtype=torch.float64)
    before = head(hidden)
    for mean, std in seen:
        head.follow(mean, std)
        torch.testing.assert_close(head(hidden), before, rtol=1e-9, atol=1e-9)


@given(seen=st.lists(st.tuples(MEANS, STDS), min_size=1, max_size=6), step=st.floats(0.01, 1.0))
def test_mean_and_scale_are_those_of_a_weighted_mixture(seen, step):
    """Each rollout weighs ``step * (1 - step) ** age``, and all of them together 1."""
    head = some_head(step)
    for mean, std in seen:
        head.follow(mean, std)
    weights = torch.tensor([step * (1 - step) ** age for age in range(len(seen))][::-1], dtype=torch.float64)
    weights /= weights.sum()
    means, stds = torch.tensor(seen, dtype=torch.float64).T
    mean = (weights * means).sum()
    spread = (weights * (stds**2 + means**2)).sum() - mean**2
    torch.testing.assert_close(head.mean, mean, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(head.std, spread.sqrt(), rtol=1e-5, atol=1e-6)


def test_equal_returns_leave_values_finite():
    head, hidden = some_head(0.5), torch.randn(8, 4, dtype=torch.float64)
    before = head(hidden)
    for _ in range(20):
        head.follow(0.0, 0.0)
    assert float(head.std) >= LEAST_STD
    torch.testing.assert_close(head(hidden), before)
    head.follow(1.0, 0.5)
    torch.testing.assert_close(head(hidden), before)


def test_the_first_rollout_gives_mean_and_scale_alone():
    for step in (0.1, 0.3, 1.0):
        head = PopArtHead(4, step)
        head.follow(-0.1, 0.0)
        assert float(head.std) == pytest.approx(LEAST_STD, rel=1e-6)
        assert float(head.mean) == pytest.approx(-0.1, rel=1e-6)


def test_units_stay_in_32_bits():
    critic = SharedCritic(popart=0.3)
    critic.build(4, lambda name: pytest.fail("a shared critic loads nothing"))
    head = popart_head(critic)
    assert head is not None
    head.follow(1 / 3, 2 / 3)
    exact = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    critic.to(torch.bfloat16)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, exact[name]), name


@pytest.mark.parametrize("step", [0.0, -0.1, 1.5, float("nan")])
def test_a_share_outside_of_its_range_is_refused(step):
    with pytest.raises(ValueError, match=r"above 0 and at most 1, got .*critic\.init_args\.popart"):
        SharedCritic(popart=step)
