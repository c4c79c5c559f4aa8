from __future__ import annotations

from typing import get_args

import pytest
import torch

from lightning_agentrl.losses import AggregationMode, aggregate, masked_sum, row_weights
from tests.losses import definitions
from tests.losses.ranks import on_ranks

NAN, INF = float("nan"), float("inf")
X = torch.tensor([[1.0, NAN, 3.0], [INF, 5.0, NAN], [NAN, NAN, -INF]])
MASK = torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
MODES = get_args(AggregationMode)
GROUPS = torch.tensor([7, 2**40, 7, 3, 2**40, 7])


def settings(mode: str, rows: slice = slice(None)) -> dict:
    """What a mode needs besides the mask."""
    extra = {"seq-mean-token-sum-norm": {"norm_tokens": 10}, "prompt-mean": {"groups_B": GROUPS[rows]}}
    return {"mode": mode, **extra.get(mode, {})}


def random_case(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six rows, the fourth of them empty and alone in its group."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.5
    mask[3] = False
    return x, mask


def test_masked_sum_reads_the_mask_only():
    assert float(masked_sum(X, MASK)) == 9.0
    assert masked_sum(X.bfloat16(), MASK).dtype == torch.float32
    with pytest.raises(ValueError, match="one shape"):
        masked_sum(X, MASK[:1])


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("token-mean", 9 / 3),
        ("token-sum", 9.0),
        ("seq-mean-token-sum", (4 + 5) / 2),  # the empty row does not count
        ("seq-mean-token-mean", (4 / 2 + 5) / 2),
        ("seq-mean-token-sum-norm", (4 + 5) / 2 / 10),
        ("prompt-mean", (9 / 3) / 1),
    ],
)
def test_numbers_by_hand(mode, want):
    kwargs = settings(mode) | ({"groups_B": torch.tensor([1, 1, 2])} if mode == "prompt-mean" else {})
    weights = row_weights(MASK, **kwargs)
    assert float(aggregate(X, MASK, weights)) == pytest.approx(want)
    assert float(aggregate(X, MASK, weights, scale=4)) == pytest.approx(4 * want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_definition(mode, seed):
    x, mask = random_case(seed)
    loss = aggregate(x, mask, row_weights(mask, **settings(mode)))
    want = definitions.aggregated(x.tolist(), mask.tolist(), mode, GROUPS.tolist(), 10)
    assert float(loss) == pytest.approx(want, abs=1e-8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_two_ranks_whose_gradients_are_averaged_equal_one(mode, cut):
    """Also where one of them has no rows."""
    x, mask = random_case(1)
    whole = aggregate(x, mask, row_weights(mask, **settings(mode)))
    ranks = [slice(0, cut), slice(cut, 6)]
    weights = on_ranks(
        lambda rank, gather: row_weights(mask[ranks[rank]], **settings(mode, ranks[rank]), gather=gather)
    )
    parts = [aggregate(x[rows], mask[rows], w, scale=2.0) for rows, w in zip(ranks, weights, strict=True)]
    torch.testing.assert_close(sum(parts) / 2, whole)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(0, 0), (6, 3)])
def test_without_tokens_the_loss_is_zero_and_has_a_graph(mode, shape):
    x = torch.ones(shape, requires_grad=True)
    mask = torch.zeros(shape)
    loss = aggregate(x, mask, row_weights(mask, **settings(mode, slice(0, shape[0]))))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(x.grad, torch.zeros(shape))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"prompt-mean.*'mean'"):
        row_weights(MASK, "mean")
    with pytest.raises(ValueError, match=r"seq-mean-token-sum-norm"):
        row_weights(MASK, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="got 8 with token-mean"):
        row_weights(MASK, "token-mean", norm_tokens=8)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        row_weights(MASK, "seq-mean-token-sum-norm", norm_tokens=0)
