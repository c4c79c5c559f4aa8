from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lightning_agentrl.losses import aggregate, masked_sum

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[1.0, NAN, 3.0], [INF, 5.0, NAN], [NAN, NAN, -INF]])
MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])


def test_masked_sum_reads_the_mask_only():
    assert float(masked_sum(X, MASK)) == 9.0
    assert masked_sum(X.bfloat16(), MASK).dtype == torch.float32
    with pytest.raises(ValueError, match="one shape"):
        masked_sum(X, MASK[:1])


def test_token_mean():
    assert float(aggregate(X, MASK, total=3)) == pytest.approx(3.0)
    assert float(aggregate(X, MASK, total=12, scale=4)) == pytest.approx(3.0)


def test_how_a_mini_batch_is_split_does_not_change_the_gradient():
    x, mask = torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5) < 0.5
    gradients = []
    for cuts in ([0, 6], [0, 1, 4, 6], [0, 2, 2, 6]):
        leaf = x.clone().requires_grad_(True)
        for start, end in pairwise(cuts):
            aggregate(leaf[start:end].square(), mask[start:end], total=float(mask.sum())).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], torch.where(mask, 2 * x / mask.sum(), 0.0))
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_two_ranks_whose_gradients_are_averaged_equal_one():
    x, mask = torch.randn(4, 5, dtype=torch.float64), torch.rand(4, 5) < 0.5
    total = float(mask.sum())
    ranks = [aggregate(x[rows], mask[rows], total=total, scale=2.0) for rows in (slice(0, 1), slice(1, 4))]
    torch.testing.assert_close(sum(ranks) / 2, aggregate(x, mask, total=total))


@pytest.mark.parametrize("shape", [(0, 0), (2, 3)])
def test_without_action_tokens_the_loss_is_zero_and_has_a_graph(shape):
    x = torch.ones(shape, requires_grad=True)
    loss = aggregate(x, torch.zeros(shape), total=0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(x.grad, torch.zeros(shape))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="must be one of token-mean, got 'mean'"):
        aggregate(X, MASK, "mean", total=3)
    with pytest.raises(ValueError, match="negative, got -1"):
        aggregate(X, MASK, total=-1)
