from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_agentrl.losses import clipped_value_loss, first_token_weights

f64 = partial(torch.tensor, dtype=torch.float64)
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def by_definition(value: float, old: float, target: float, clip: float | None) -> float:
    plain = 0.5 * (value - target) ** 2
    if clip is None:
        return plain
    kept_near = min(max(value, old - clip), old + clip)
    return max(plain, 0.5 * (kept_near - target) ** 2)


def random_values(seed: int, shape: tuple[int, ...] = (3, 7)) -> Tensor:
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.sampled_from([None, 0.01, 0.5, 2.0]))
def test_equals_the_definition(seed, clip):
    values, old, returns = random_values(seed)
    tokens = zip(values.flatten().tolist(), old.flatten().tolist(), returns.flatten().tolist(), strict=True)
    want = f64([by_definition(*token, clip) for token in tokens])
    close(clipped_value_loss(values, old, returns, clip).flatten(), want)


def test_hand_computed_numbers():
    # inside the window; moved too far towards the target (held); moved too far away from it (pulled back).
    values, old, returns = f64([1.2, 2.0, -1.0]), f64([1.0, 0.0, 0.0]), f64([0.0, 2.0, 2.0])
    close(clipped_value_loss(values, old, returns), f64([0.72, 1.125, 4.5]))
    close(clipped_value_loss(values, old, returns, clip=None), f64([0.72, 0.0, 4.5]))


def test_a_held_value_has_no_gradient_and_a_lost_one_has():
    values = f64([2.0, -1.0]).requires_grad_(True)
    clipped_value_loss(values, f64([0.0, 0.0]), f64([2.5, 2.0])).sum().backward()
    close(values.grad, f64([0.0, -3.0]))


@pytest.mark.parametrize("clip", [None, 0.3])
def test_gradcheck(clip):
    values, old, returns = random_values(1)
    values.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, old, returns, clip), (values,))


def test_targets_get_no_gradient():
    values, old, returns = (x.clone().requires_grad_(True) for x in random_values(2))
    clipped_value_loss(values, old, returns).sum().backward()
    assert old.grad is None
    assert returns.grad is None


def test_bf16_is_computed_in_float32():
    values, old, returns = random_values(3).bfloat16()
    loss = clipped_value_loss(values, old, returns)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, clipped_value_loss(values.float(), old.float(), returns.float()))


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"returns \[2\]"):
        clipped_value_loss(torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2))


# Weight of the first token of a turn


def test_first_tokens_of_turns_carry_the_weight():
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0]])
    turns = torch.tensor(
        [
            [0, 0, 1, 1, 4, 4],  # several turns side by side, then padding that pretends to be of the last turn
            [2, 9, 2, -9, 2, 3],  # one turn with observations inside: their ids are junk and hide no turn
            [5, 5, 5, 7, 7, 7],  # junk equal to the turn that follows it
            [0, 1, 2, 3, 4, 5],
        ]
    )
    want = [[3, 1, 3, 1, 3, 0], [3, 0, 1, 0, 1, 3], [0, 3, 1, 0, 0, 3], [0] * 6]
    got = first_token_weights(mask, turns, 3.0)
    assert got.tolist() == want
    assert torch.equal(got, first_token_weights(mask.bool(), turns.int(), 3.0))


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=5, max_size=5), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
def test_weights_equal_a_plain_loop(rows, seed):
    """Each row: whether a token was sampled, and by how much its turn is later than that of the token before."""
    mask = torch.tensor([[sampled for sampled, _ in row] for row in rows])
    turns = torch.tensor([[step for _, step in row] for row in rows]).cumsum(1)
    want = torch.zeros(mask.shape)
    for i in range(len(rows)):
        seen = set()
        for t in range(5):
            if mask[i, t]:
                want[i, t] = 1.0 if int(turns[i, t]) in seen else 3.0
                seen.add(int(turns[i, t]))
    junk = torch.randint(-99, 99, turns.shape, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(first_token_weights(mask, torch.where(mask, turns, junk), 3.0), want)


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0)])
def test_weights_of_nothing(shape):
    turns = torch.zeros(shape, dtype=torch.int64)
    assert first_token_weights(torch.ones(shape), turns, 3.0).shape == shape


def test_a_weight_of_one_is_the_mask():
    mask = torch.tensor([[True, True, False, True]])
    assert torch.equal(first_token_weights(mask, torch.tensor([[0, 0, 0, 1]]), 1.0), mask.float())
