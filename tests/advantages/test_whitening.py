from __future__ import annotations

import math

import pytest
import torch

from lightning_agentrl.advantages import kl_in_reward, value_statistics, whiten
from tests.advantages.ranks import on_two_ranks

NAN = float("nan")


def test_mean_and_unbiased_variance():
    x, mask = torch.tensor([[1.0, 2.0, NAN], [4.0, 7.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    numbers = [1.0, 2.0, 4.0, 9.0]
    std = math.sqrt(sum((n - 4) ** 2 for n in numbers) / 3 + 1e-8)
    expected = torch.tensor([[-3 / std, -2 / std, 0], [0, 0, 5 / std]])
    torch.testing.assert_close(whiten(x, mask), expected, rtol=0, atol=1e-6)


def test_epsilon_stands_inside_the_root():
    got = whiten(torch.tensor([[0.0, 2e-4]], dtype=torch.float64), torch.ones(1, 2))
    assert float(got[0, 1]) == pytest.approx(1e-4 / math.sqrt(2e-8 + 1e-8), rel=1e-9)


def test_numbers_off_the_mask_and_padding_change_nothing():
    x, mask = torch.randn(5, 9), torch.rand(5, 9) < 0.6
    want = whiten(x, mask)
    noisy = torch.where(mask, x, torch.tensor([NAN, torch.inf, -torch.inf])[torch.randint(3, (5, 9))])
    assert torch.equal(whiten(noisy, mask), want)
    pad = torch.nn.functional.pad
    assert torch.equal(whiten(pad(noisy, (2, 3), value=NAN), pad(mask, (2, 3))), pad(want, (2, 3)))
    assert torch.equal(want[~mask], torch.zeros(int((~mask).sum())))
    order = torch.randperm(5)
    torch.testing.assert_close(whiten(x[order], mask[order]), want[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tokens", [0, 1])
def test_fewer_than_two_tokens_stay_unchanged(tokens: int):
    x, mask = torch.tensor([[3.0, NAN]]), torch.tensor([[tokens, 0]])
    assert torch.equal(whiten(x, mask), torch.tensor([[3.0 * tokens, 0.0]]))
    assert whiten(torch.zeros(0, 0), torch.zeros(0, 0)).shape == (0, 0)


def test_equal_numbers_become_zero():
    got = whiten(torch.full((3, 7), 0.1), torch.ones(3, 7))
    assert float(got.abs().max()) < 1e-6


def test_a_large_mean_keeps_its_digits():
    x = 1e7 + torch.arange(8.0, dtype=torch.float32).view(2, 4)
    torch.testing.assert_close(whiten(x, torch.ones(2, 4)), whiten(x - 1e7, torch.ones(2, 4)), rtol=1e-6, atol=1e-6)
    x64 = 1e12 + torch.arange(8.0, dtype=torch.float64).view(2, 4) / 8
    small = whiten(x64 - 1e12, torch.ones(2, 4))
    torch.testing.assert_close(whiten(x64, torch.ones(2, 4)), small, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_two_ranks_equal_one(first: int):
    x, mask = torch.randn(4, 6), torch.rand(4, 6) < 0.7
    x[:2] += 3.0
    parts = [slice(0, first), slice(first, None)]
    got = on_two_ranks(lambda rank, reduce: whiten(x[parts[rank]], mask[parts[rank]], reduce))
    torch.testing.assert_close(torch.cat(got), whiten(x, mask), rtol=1e-6, atol=1e-7)


def test_one_token_on_each_rank_is_two():
    x = torch.tensor([[1.0], [3.0]])
    got = on_two_ranks(lambda rank, reduce: whiten(x[rank : rank + 1], torch.ones(1, 1), reduce))
    torch.testing.assert_close(torch.cat(got), whiten(x, torch.ones(2, 1)))
    assert float(got[1]) == pytest.approx(2**-0.5, rel=1e-6)


def test_bf16_is_upcast_and_no_gradient_passes():
    x = torch.randn(3, 4).bfloat16().requires_grad_(True)
    got = whiten(x, torch.ones(3, 4))
    assert got.dtype == torch.float32
    assert not got.requires_grad
    assert torch.equal(got, whiten(x.detach().float(), torch.ones(3, 4)))


# Explained variance


def explained_variance(*args):
    return value_statistics(*args).explained_variance


def test_explained_variance_from_its_definition():
    returns, mask = torch.randn(6, 8), torch.rand(6, 8) < 0.5
    values = returns + 0.5 * torch.randn(6, 8) + 2.0  # a constant error explains nothing away
    want = 1 - float((returns - values)[mask].var() / returns[mask].var())
    noisy_values, noisy_returns = torch.where(mask, values, NAN), torch.where(mask, returns, torch.inf)
    assert explained_variance(noisy_values, noisy_returns, mask) == pytest.approx(want, rel=1e-5)
    assert explained_variance(returns + 2.0, returns, mask) == pytest.approx(1.0, abs=1e-6)
    assert explained_variance(torch.full_like(returns, 4.0), returns, mask) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0, abs=1e-6)


def test_explained_variance_of_two_ranks_is_that_of_all():
    values, returns, mask = torch.randn(4, 6), torch.randn(4, 6), torch.rand(4, 6) < 0.7
    returns[:1] += 5.0
    parts = [slice(0, 1), slice(1, None)]
    got = on_two_ranks(
        lambda r, reduce: explained_variance(values[parts[r]], returns[parts[r]], mask[parts[r]], reduce)
    )
    assert got[0] == got[1] == pytest.approx(explained_variance(values, returns, mask), rel=1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_nothing_to_explain_is_nan(tokens: int):
    mask = torch.arange(7)[None] < tokens
    assert math.isnan(explained_variance(torch.randn(1, 7), torch.full((1, 7), 0.1), mask))


def test_equal_returns_in_float64_miss_their_mean_by_rounding_and_are_still_nan():
    returns = torch.full((1, 1000), 0.1, dtype=torch.float64)
    assert float((returns - returns.mean()).square().sum()) > 0  # what an exact test against 0 would trip over
    assert math.isnan(explained_variance(torch.randn(1, 1000), returns, torch.ones(1, 1000)))


# KL in the reward


def test_kl_is_subtracted_on_action_tokens_only():
    rewards, kl = torch.tensor([[0.0, NAN, 1.0]]), torch.tensor([[0.5, torch.inf, -0.25]])
    got = kl_in_reward(rewards, kl, torch.tensor([[1, 0, 1]]), beta=0.1)
    torch.testing.assert_close(got, torch.tensor([[-0.05, 0.0, 1.025]]))


def test_kl_in_reward_is_float32_without_gradient():
    rewards, kl = (torch.full((1, 2), x).bfloat16().requires_grad_(True) for x in (1.0, 0.01))
    got = kl_in_reward(rewards, kl, torch.ones(1, 2), beta=0.001)
    assert got.dtype == torch.float32
    assert not got.requires_grad
    assert float(got[0, 0].detach()) == pytest.approx(1 - 1e-5, abs=1e-7)
