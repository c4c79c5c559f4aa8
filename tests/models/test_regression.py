"""Regression with running sums: the solution of its definition, however what it saw was split."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_agentrl.models.regression import RunningRegression

SIZE = 5
FEW = settings(max_examples=25)


def one_rank(x: torch.Tensor) -> torch.Tensor:
    return x


def some_data(seed: int, count: int) -> tuple[torch.Tensor, ...]:
    """States far from 0, numbers, weights of which some are 0, and marks; two at least are marked and count."""
    random = torch.Generator().manual_seed(seed)
    states = torch.randn(count, SIZE, generator=random, dtype=torch.float64) * 3 + 10
    numbers = states @ torch.randn(SIZE, generator=random, dtype=torch.float64) + torch.randn(
        count, generator=random, dtype=torch.float64
    )
    weights = torch.rand(count, generator=random, dtype=torch.float64)
    weights[::7] = 0.0
    marks = torch.rand(count, generator=random) < 0.6
    weights[1], marks[1], weights[2], marks[2] = 0.5, True, 0.5, True
    return states, numbers, weights, marks


def fitted(parts, ridge=1.0, keep=1.0) -> RunningRegression:
    regression = RunningRegression(SIZE, ridge).double()
    regression.weights, regression.constant = regression.weights.double(), regression.constant.double()
    for part in parts:
        regression.take_in(*part)
        regression.fit(one_rank, keep)
    return regression


def by_definition(states, numbers, weights, marked, ridge):
    """Weights and constant of the least penalised sum of squares: rows of the penalty stand below those of states.

    ``marked`` says how much each state counts for how far states are apart.
    """
    share = marked / marked.sum()
    apart = float(share @ (states - share @ states).square().sum(1))
    roots = weights.sqrt()[:, None]
    above = torch.cat([states * roots, roots], 1)
    below = torch.cat([torch.eye(SIZE, dtype=torch.float64) * (ridge * apart) ** 0.5, torch.zeros(SIZE, 1).double()], 1)
    target = torch.cat([numbers * roots[:, 0], torch.zeros(SIZE, dtype=torch.float64)])
    solution = torch.linalg.lstsq(torch.cat([above, below]), target).solution
    return solution[:-1], solution[-1]


@FEW
@given(seed=st.integers(0, 1000), count=st.integers(3, 40), ridge=st.floats(0.01, 100))
def test_it_solves_what_its_definition_says(seed, count, ridge):
    data = some_data(seed, count)
    regression = fitted([data], ridge)
    weights, constant = by_definition(*data[:3], (data[3] & (data[2] > 0)).double(), ridge)
    torch.testing.assert_close(regression.weights, weights, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(regression.constant, constant, rtol=1e-6, atol=1e-6)


@FEW
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_parts_and_ranks_give_what_the_whole_gives(seed, cuts):
    """Some parts may be empty. Each part is a micro-batch here, a step there, and the share of a rank in the third."""
    data = some_data(seed, 30)
    bounds = [0, *sorted(cuts), 30]
    parts = [tuple(x[begin:end] for x in data) for begin, end in pairwise(bounds)]
    whole, micro, ranks = fitted([data]), fitted([]), [fitted([]) for _ in parts]
    for part in parts:
        micro.take_in(*part)
    micro.fit(one_rank, 1.0)
    for rank, part in zip(ranks, parts, strict=True):
        rank.take_in(*part)
    shares = []
    for rank in ranks:
        rank.fit(lambda x: (shares.append(x), x)[1], 1.0)
    joined = fitted([])
    joined.fit(lambda x: x + sum(shares), 1.0)
    for other in (micro, fitted(parts), joined):
        torch.testing.assert_close(other.weights, whole.weights, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(other.constant, whole.constant, rtol=1e-7, atol=1e-7)


@FEW
@given(seed=st.integers(0, 1000), keep=st.floats(0.0, 1.0))
def test_what_is_older_counts_less(seed, keep):
    old, new = some_data(seed, 20), some_data(seed + 1, 20)
    forgetful = fitted([old, new], keep=keep)
    states, numbers, weights, marks = (torch.cat(pair) for pair in zip(old, new, strict=True))
    age = torch.cat([torch.full((20,), keep), torch.ones(20)]).double()
    expected = by_definition(states, numbers, weights * age, (marks & (weights > 0)) * age, 1.0)
    torch.testing.assert_close(forgetful.weights, expected[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(forgetful.constant, expected[1], rtol=1e-6, atol=1e-6)


@FEW
@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100), shift=st.floats(-100, 100), unit=st.floats(0.01, 100))
def test_scale_and_origin_of_states_change_no_value_and_units_of_numbers_change_nothing_else(seed, scale, shift, unit):
    states, numbers, *others = some_data(seed, 20)
    values = fitted([(states, numbers, *others)])(states)
    other = fitted([(states * scale + shift, numbers * unit + 5, *others)])(states * scale + shift)
    torch.testing.assert_close((other - 5) / unit, values, rtol=1e-4, atol=1e-4)


def test_it_explains_what_is_linear_and_leaves_noise():
    """Half of the variance is of one direction of the states, the other half is noise."""
    random = torch.Generator().manual_seed(0)
    states, noise = torch.randn(2000, SIZE, generator=random), torch.randn(2000, generator=random)
    numbers = states[:, 0] + noise
    regression = fitted([(states[:1000], numbers[:1000], torch.ones(1000), torch.ones(1000).bool())])
    left = numbers[1000:] - regression(states[1000:].double())
    assert float(left.var() / numbers[1000:].var()) == pytest.approx(0.5, abs=0.06)


def test_before_anything_is_seen_it_says_0_and_of_equal_states_their_mean():
    states = torch.full((4, SIZE), 2.0)
    nothing = fitted([])
    assert not nothing(states).any()
    nothing.fit(one_rank, 1.0)
    assert not nothing(states).any()
    for marks in (torch.ones(4), torch.zeros(4)):
        same = fitted([(states, torch.tensor([0.0, 1.0, 2.0, 9.0]), torch.ones(4), marks.bool())])
        assert same(states).tolist() == pytest.approx([3.0] * 4)


def test_what_does_not_count_is_not_read_and_what_was_spoiled_is_forgotten():
    states, numbers, weights, marks = some_data(3, 20)
    clean = fitted([(states, numbers, weights, marks)])
    states[::7], numbers[::7] = torch.nan, torch.inf
    regression = fitted([(states, numbers, weights, marks)])
    assert torch.equal(regression.weights, clean.weights)
    regression.take_in(states, numbers, torch.ones(20), marks)
    regression.forget_new()
    regression.fit(one_rank, 1.0)
    assert torch.equal(regression.weights, clean.weights)


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
