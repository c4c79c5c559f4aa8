"""Regression with running sums: the solution of its definition, however what it saw was split."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.models.critic import RunningRegression

SIZE = 5
FEW = settings(max_examples=25)


def one_rank(x: torch.Tensor) -> torch.Tensor:
    return x


def some_data(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States far from 0, and numbers."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(count, SIZE, generator=random, dtype=torch.float64) * 3 + 10
    slope = torch.randn(SIZE, generator=random, dtype=torch.float64)
    return states, states @ slope + torch.randn(count, generator=random, dtype=torch.float64)


def fitted(parts, ridge=1.0, keep=1.0) -> RunningRegression:
    regression = RunningRegression(SIZE, ridge)
    regression.weights, regression.constant = regression.weights.double(), regression.constant.double()
    for part in parts:
        regression.take_in(*part)
        regression.fit(one_rank, keep)
    return regression


def by_definition(states, numbers, counts, ridge):
    """Weights and constant of the least penalised sum of squares: rows of the penalty stand below those of states."""
    share = counts / counts.sum()
    apart = float(share @ (states - share @ states).square().sum(1))
    roots = counts.sqrt()[:, None]
    above = torch.cat([states * roots, roots], 1)
    below = torch.cat([torch.eye(SIZE).double() * (ridge * apart) ** 0.5, torch.zeros(SIZE, 1).double()], 1)
    target = torch.cat([numbers * roots[:, 0], torch.zeros(SIZE, dtype=torch.float64)])
    solution = torch.linalg.lstsq(torch.cat([above, below]), target).solution
    return solution[:-1], solution[-1]


def assert_same(regression, weights, constant):
    torch.testing.assert_close(regression.weights, weights, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(regression.constant, constant, rtol=1e-6, atol=1e-6)


@FEW
@given(seed=st.integers(0, 1000), count=st.integers(2, 40), ridge=st.floats(0.01, 100))
def test_it_solves_what_its_definition_says(seed, count, ridge):
    data = some_data(seed, count)
    assert_same(fitted([data], ridge), *by_definition(*data, torch.ones(count).double(), ridge))


@FEW
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_parts_and_ranks_give_what_the_whole_gives(seed, cuts):
    """Some parts may be empty. Each part is a micro-batch here, a step there, and the share of a rank in the third."""
    data = some_data(seed, 30)
    parts = [tuple(x[begin:end] for x in data) for begin, end in pairwise([0, *sorted(cuts), 30])]
    whole, micro, joined = fitted([data]), fitted([]), fitted([])
    shares = []
    for part in parts:
        micro.take_in(*part)
        rank = fitted([])
        rank.take_in(*part)
        rank.fit(lambda x: (shares.append(x), x)[1], 1.0)
    micro.fit(one_rank, 1.0)
    joined.fit(lambda x: x + sum(shares), 1.0)
    for other in (micro, fitted(parts), joined):
        assert_same(other, whole.weights, whole.constant)


@FEW
@given(seed=st.integers(0, 1000), keep=st.floats(0.0, 1.0))
def test_what_is_older_counts_less(seed, keep):
    parts = [some_data(seed + number, 20) for number in range(3)]
    states, numbers = (torch.cat(xs) for xs in zip(*parts, strict=True))
    counts = torch.tensor([keep**2, keep, 1.0]).double().repeat_interleave(20)
    assert_same(fitted(parts, keep=keep), *by_definition(states, numbers, counts, 1.0))


@FEW
@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100), shift=st.floats(-100, 100), unit=st.floats(0.01, 100))
def test_scale_and_origin_of_states_change_no_value_and_units_of_numbers_change_nothing_else(seed, scale, shift, unit):
    states, numbers = some_data(seed, 20)
    values = fitted([(states, numbers)])(states)
    other = fitted([(states * scale + shift, numbers * unit + 5)])(states * scale + shift)
    torch.testing.assert_close((other - 5) / unit, values, rtol=1e-4, atol=1e-4)


def test_it_explains_what_is_linear_and_leaves_noise():
    """Half of the variance is of one direction of the states, the other half is noise."""
    random = torch.Generator().manual_seed(0)
    states, noise = torch.randn(2000, SIZE, generator=random), torch.randn(2000, generator=random)
    numbers = states[:, 0] + noise
    left = numbers[1000:] - fitted([(states[:1000], numbers[:1000])])(states[1000:].double())
    assert float(left.var() / numbers[1000:].var()) == pytest.approx(0.5, abs=0.06)


def test_before_anything_is_seen_it_says_0_and_of_equal_states_their_mean():
    states = torch.full((4, SIZE), 2.0)
    nothing = fitted([])
    assert not nothing(states).any()
    nothing.fit(one_rank, 1.0)
    assert not nothing(states).any()
    same = fitted([(states, torch.tensor([0.0, 1.0, 2.0, 9.0]))])
    assert same(states).tolist() == pytest.approx([3.0] * 4)


def test_what_was_spoiled_is_forgotten():
    regression = fitted([some_data(3, 20)])
    before = regression.weights.clone()
    regression.take_in(torch.full((2, SIZE), torch.nan), torch.zeros(2))
    regression.forget_new()
    regression.fit(one_rank, 1.0)
    assert torch.equal(regression.weights, before)


def test_sums_are_moved_but_never_cast_and_are_saved():
    regression = RunningRegression(SIZE, 1.0)
    regression.take_in(*some_data(5, 20))
    regression.fit(one_rank, 1.0)
    exact = {name: x.clone() for name, x in regression.state_dict().items()}
    regression.to(torch.bfloat16)
    assert all(torch.equal(x, exact[name]) and x.dtype == exact[name].dtype for name, x in regression.named_buffers())
    other = RunningRegression(SIZE, 1.0)
    other.load_state_dict(exact)
    states = torch.randn(3, SIZE)
    assert torch.equal(other(states), regression(states))
    hidden = torch.randn(3, SIZE, requires_grad=True)
    assert not regression(hidden).requires_grad
