"""Numbers by hand; properties of all corrections are in test_conformance.py."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_agentrl.losses import (
    Bypass,
    DivergenceRejection,
    IcePop,
    RatioRejection,
    RejectOnly,
    TruncatedWeights,
    divergence_below,
    effective_share,
    importance_ratios,
    ratio_inside,
)
from lightning_agentrl.losses.correction import at_level
from tests.losses.ranks import on_ranks, summed

# Ratios trainer / engine: two rows, the second with one place off the mask
RATIOS = torch.tensor([[0.5, 4.0, 1.0], [3.0, 0.2, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
ENGINE = torch.full((2, 3), -1.0, dtype=torch.float64)
TRAIN = ENGINE + RATIOS.log()


def weights(correction):
    got, keep = correction(TRAIN, ENGINE, MASK)
    return got.tolist(), keep.tolist()


def near(rows):
    return [pytest.approx(row) for row in rows]


def test_ratios_are_those_of_the_trainer_to_the_engine():
    got, _ = weights(TruncatedWeights(cap=2.0))
    assert got == near([[0.5, 2.0, 1.0], [2.0, 0.2, 0.0]])


def test_ratios_of_rows():
    assert weights(TruncatedWeights("sequence", cap=10.0))[0] == near([[2.0, 2.0, 2.0], [0.6, 0.6, 0.0]])
    assert weights(TruncatedWeights("sequence", cap=1.5))[0] == near([[1.5, 1.5, 1.5], [0.6, 0.6, 0.0]])


def test_icepop():
    assert weights(IcePop("token", 0.49, 3.1))[0] == near([[0.5, 0.0, 1.0], [3.0, 0.0, 0.0]])
    got, keep = weights(IcePop("sequence", 0.7, 3.0))
    assert got == near([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    assert keep == MASK.tolist()  # they stay in the denominators
    ends = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    assert torch.equal(IcePop("token", 0.5, 2.0).bounded(ends), ends)  # the interval is closed


def test_normalised_weights_have_the_mean_one():
    got, _ = weights(TruncatedWeights(cap=2.0, normalise=True))
    assert got == near([[x / (5.7 / 5) for x in (0.5, 2.0, 1.0)], [x / (5.7 / 5) for x in (2.0, 0.2, 0.0)]])
    got, _ = weights(TruncatedWeights("sequence", cap=10.0, normalise=True))
    assert got == near([[2.0 / 1.3] * 3, [0.6 / 1.3, 0.6 / 1.3, 0.0]])  # a row counts once however long it is


def test_small_weights_are_normalised_too():
    got, _ = TruncatedWeights(normalise=True)(ENGINE - 9 + RATIOS.log(), ENGINE, MASK)
    assert got.sum().item() == pytest.approx(5)


def test_rejected_tokens_leave_the_mean_too():
    got, keep = weights(TruncatedWeights(cap=4.0, normalise=True, rejections=[RatioRejection("token", 0.4, 3.5)]))
    assert keep == [[True, False, True], [True, False, False]]
    mean = (0.5 + 1.0 + 3.0) / 3
    assert got[0][0] == pytest.approx(0.5 / mean)
    assert got[1][0] == pytest.approx(3.0 / mean)


def test_weights_that_are_all_zero_stay_zero():
    assert weights(IcePop("token", 0.999, 1.0001, normalise=True))[0][1] == [0.0, 0.0, 0.0]
    got, _ = IcePop("token", 0.9, 1.1, normalise=True)(ENGINE + 1, ENGINE, MASK)
    assert not got.any()


@pytest.mark.parametrize(
    ("level", "low", "high", "want"),
    [
        ("token", 0.4, 3.5, [[1, 0, 1], [1, 0, 0]]),
        ("sum", 0.5, 1.9, [[0, 0, 0], [1, 1, 0]]),  # products 2 and 0.6
        ("sum", 0.7, 2.1, [[1, 1, 1], [0, 0, 0]]),
        ("mean", 0.8, 1.2, [[0, 0, 0], [0, 0, 0]]),  # geometric means 1.26 and 0.77
        ("mean", 0.8, 1.3, [[1, 1, 1], [0, 0, 0]]),
        ("max", 0.4, 4.1, [[1, 1, 1], [0, 0, 0]]),  # every token of the row has to be inside
        ("max", 0.1, 3.1, [[0, 0, 0], [1, 1, 0]]),
    ],
)
def test_rejection_by_the_ratio(level, low, high, want):
    assert RejectOnly([RatioRejection(level, low, high)])(TRAIN, ENGINE, MASK)[1].int().tolist() == want


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_rejection_by_a_divergence(kind):
    logs = [[math.log(r) for r in row] for row in ((0.5, 4.0, 1.0), (3.0, 0.2))]
    values = [[x * x / 2 if kind == "k2" else math.exp(x) - 1 - x for x in row] for row in logs]
    of_rows = {"sum": sum, "mean": lambda row: sum(row) / len(row), "max": max}
    for level, statistic in of_rows.items():
        first, second = (statistic(row) for row in values)
        correction = RejectOnly([DivergenceRejection((first + second) / 2, kind, level)])
        want = [[first < second] * 3, [second < first, second < first, False]]
        assert correction(TRAIN, ENGINE, MASK)[1].tolist() == want
    got = RejectOnly([DivergenceRejection(0.5, kind, "token")])(TRAIN, ENGINE, MASK)[1]
    assert got.tolist() == [[x <= 0.5 for x in values[0]], [*(x <= 0.5 for x in values[1]), False]]


def test_geometric_rejection_is_the_default():
    logs = torch.tensor([[0.02, -0.02, 0.015], [0.02, 0.02, 0.02]], dtype=torch.float64)
    keep = RejectOnly()(ENGINE + logs, ENGINE, torch.ones(2, 3))[1]
    assert keep.tolist() == [[True] * 3, [False] * 3]


def test_bypass_gives_no_weights_and_needs_the_trainer_only_to_reject():
    assert Bypass.bypass
    assert Bypass()(TRAIN, ENGINE, MASK)[0] is None
    assert not Bypass().needs_old_logps
    assert Bypass([RatioRejection()]).needs_old_logps
    assert TruncatedWeights().needs_old_logps
    with pytest.raises(TypeError):
        Bypass(cap=2.0)  # weights would correct a second time


def test_weights_may_be_cut_off_at_one():
    assert weights(TruncatedWeights(cap=1.0))[0] == near([[0.5, 1.0, 1.0], [1.0, 0.2, 0.0]])


def test_effective_share():
    w = torch.tensor([[1.0, 3.0, 9.0], [0.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert effective_share(w, mask) == pytest.approx(36 / (4 * 14))
    assert effective_share(torch.ones(2, 3), mask) == 1.0
    assert effective_share(torch.zeros(2, 3), mask) == 0.0
    assert effective_share(torch.ones(0, 0), torch.ones(0, 0)) == 0.0
    shares = on_ranks(lambda rank, gather: effective_share(w[rank : rank + 1], mask[rank : rank + 1], summed(gather)))
    assert shares == [pytest.approx(36 / 56)] * 2


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TruncatedWeights(cap=0.5), "^TruncatedWeights: cap must be at least 1, got 0.5"),
        (lambda: IcePop(high=1.0), "^IcePop: needs 0 <= low < 1 < high, got 0.5 and 1.0"),
        (lambda: RatioRejection(high=1.0), "^RatioRejection: needs 0 < low < 1 < high, got 0.99 and 1.0"),
        (lambda: IcePop(low=1.0), "^IcePop: needs 0 <= low < 1 < high, got 1.0 and 5.0"),
        (lambda: RatioRejection(low=0.0), "^RatioRejection: needs 0 < low < 1 < high, got 0.0 and 1.01"),
        (lambda: importance_ratios(TRAIN, MASK, "row"), "token or sequence, got 'row'"),
        (lambda: at_level(TRAIN, MASK, "row"), "one of token, sum, mean, max, got 'row'"),
        (lambda: ratio_inside(TRAIN, MASK, "row", 0.5, 2.0), "one of token, sum, mean, max, got 'row'"),
        (lambda: divergence_below(TRAIN, MASK, "token", "k1", 1.0), "k2 or k3, got 'k1'"),
        (lambda: TruncatedWeights()(TRAIN, ENGINE[:1], MASK), r"one shape.*rollout_logps \[1, 3\]"),
        (lambda: TruncatedWeights()(TRAIN, ENGINE, MASK[:1]), r"one shape.*mask \[1, 3\]"),
    ],
)
def test_wrong_settings_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
