"""What every policy loss and every correction has to hold; a class is tested because it exists.

A new loss needs its definition, and a line in ``ARGUMENTS`` if it cannot be made without arguments; a new correction
stands in ``CORRECTIONS``, a new rejection in ``REJECTIONS``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import lightning_agentrl.losses  # noqa: F401 - defines the classes
from lightning_agentrl.losses import (
    AggregationMode,
    Bypass,
    DivergenceRejection,
    IcePop,
    NoCorrection,
    OffPolicyCorrection,
    PolicyLoss,
    RatioRejection,
    Rejection,
    RejectOnly,
    TruncatedWeights,
    aggregate,
    row_weights,
)
from tests.losses import definitions
from tests.losses.ranks import on_ranks, summed

NAN = float("nan")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "DRO": {"beta": 0.5},
    "ClipCov": {"share": 0.1, "cov_low": 0.1, "cov_high": 5.0},  # so that some tokens of few are picked
    "KLCov": {"share": 0.1},
}
PULL_BACK = {"DRO", "KLCov"}  # towards the old policy, whatever the advantages are


def concrete(base: type) -> list[Any]:
    """All classes of the package below a base that can be made."""
    below = [cls for child in base.__subclasses__() for cls in (child, *concrete(child))]
    own = [cls for cls in below if cls.__module__.startswith("lightning_agentrl.")]
    return sorted({cls for cls in own if not inspect.isabstract(cls)}, key=lambda cls: cls.__name__)


LOSSES: list[type[PolicyLoss]] = concrete(PolicyLoss)
of_every_loss = pytest.mark.parametrize("cls", LOSSES, ids=lambda cls: cls.__name__)


def make(cls: type) -> PolicyLoss:
    return cls(**ARGUMENTS.get(cls.__name__, {}))


class Case:
    """Random ragged rows; spread out so that every clip bites somewhere and no token is at the edge of one."""

    def __init__(self, seed: int = 0, rows: int = 7, width: int = 6, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(fn: Callable[..., Tensor] = torch.randn) -> Tensor:
            return fn(rows, width, generator=generator, dtype=torch.float64)

        self.old = -random(torch.rand) * 2.5 - 0.05
        self.logps = (self.old + 0.5 * random()).clamp_max(-0.01).to(dtype)
        self.old = self.old.to(dtype)
        self.advantages = random().to(dtype)
        self.mask = random(torch.rand) < 0.6
        self.mask[2:3] = False  # an empty row
        self.mask[3:4, 1:] = False
        self.mask[3:4, :1] = True  # a row of one token
        self.noise = random(torch.rand)
        self.groups = torch.arange(rows) // 3

    def picked(self, loss: PolicyLoss) -> Tensor:
        return loss.pick(self.logps, self.old, self.advantages, self.mask, self.noise)

    def select(self, index: Any) -> Case:
        """Some rows."""
        part = object.__new__(Case)
        for name, x in vars(self).items():
            setattr(part, name, x[index])
        return part

    def padded(self, columns: int, value: float) -> Case:
        """More columns, off the mask."""
        part = object.__new__(Case)
        for name, x in vars(self).items():
            fill = False if name == "mask" else value
            setattr(part, name, x if x.dim() == 1 else torch.nn.functional.pad(x, (0, columns), value=fill))
        return part

    def spread(self, value: float) -> tuple[Case, Tensor]:
        """Columns off the mask before, between and behind those that are there, and the columns [B, T] of those."""
        rows, width = self.mask.shape
        noise = torch.rand(rows, width + 5, generator=torch.Generator().manual_seed(0))
        places_BT = noise.argsort(1)[:, :width].sort(1).values
        part = object.__new__(Case)
        for name, x in vars(self).items():
            wide = x.new_full((rows, width + 5), False if name == "mask" else value) if x.dim() == 2 else x
            setattr(part, name, wide.scatter(1, places_BT, x) if x.dim() == 2 else x)
        return part, places_BT

    def with_empty_rows(self, value: float) -> Case:
        """One more at the beginning, one in the middle, one at the end; in groups of their own and of others."""
        part = object.__new__(Case)
        for name, x in vars(self).items():
            fill = {"mask": False, "groups": 99}.get(name, value)
            row = x.new_full((1, *x.shape[1:]), fill)
            setattr(part, name, torch.cat([row, x[:3], row, x[3:], row]))
        part.groups[-1] = self.groups[0]
        return part


FULL_ROWS = [1, 2, 3, 5, 6, 7, 8]  # where the rows of a case are in the one with more empty rows


def run(loss: PolicyLoss, case: Case, picked: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Losses, and their gradient by the log-probs under random weights per token."""
    logps = case.logps.clone().requires_grad_(True)
    picked = case.picked(loss) if picked is None else picked
    losses = loss(logps, case.old, case.advantages, case.mask, picked)
    weights = torch.linspace(0.5, 1.5, losses.shape[0], dtype=losses.dtype)[:, None]  # of rows
    (gradient,) = torch.autograd.grad((losses * weights).sum(), logps)
    return losses.detach(), gradient


def test_there_are_losses_and_each_has_a_definition() -> None:
    assert {cls.__name__ for cls in LOSSES} == set(definitions.POLICY_LOSSES)
    assert len(LOSSES) >= 11


@of_every_loss
def test_how_it_is_averaged_is_what_was_given_or_what_its_class_says(cls):
    assert make(cls).aggregation == cls.aggregation
    own = cls(**ARGUMENTS.get(cls.__name__, {}), aggregation="seq-mean-token-sum-norm", norm_tokens=7)
    assert (own.aggregation, own.norm_tokens) == ("seq-mean-token-sum-norm", 7)


def test_a_loss_of_your_own_gets_constants_and_zeros_off_the_mask_in_one_dtype():
    class Watching(PolicyLoss):
        def token_loss(self, *given):
            self.given = given
            return given[0]

    loss, mask = Watching(), torch.tensor([[True, False]])
    x = torch.tensor([[2.0, NAN]], requires_grad=True)
    loss(x.bfloat16(), x.double(), x, mask)
    *numbers, got_mask = loss.given
    assert torch.equal(got_mask, mask)
    assert [(y.tolist(), y.dtype) for y in numbers] == [([[2.0, 0.0]], torch.float64)] * 3
    assert [y.requires_grad for y in numbers] == [True, False, False]


@of_every_loss
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition(cls: type, seed: int) -> None:
    case, loss = Case(seed), make(cls)
    picked = case.picked(loss)
    losses, _ = run(loss, case, picked)
    x, old, adv, mask = (t.tolist() for t in (case.logps, case.old, case.advantages, case.mask))
    want = definitions.policy_loss(cls.__name__, x, x, old, adv, mask, picked.tolist())
    torch.testing.assert_close(losses, torch.tensor(want, dtype=torch.float64), rtol=1e-8, atol=1e-8)


@of_every_loss
def test_the_gradient_is_that_of_the_definition(cls: type) -> None:
    """Central differences in float64, stop-gradients held fixed."""
    case, loss = Case(1, rows=5, width=4), make(cls)
    picked = case.picked(loss)
    _, gradient = run(loss, case, picked)
    c, old, adv, mask = (t.tolist() for t in (case.logps, case.old, case.advantages, case.mask))
    weights = torch.linspace(0.5, 1.5, 5, dtype=torch.float64).tolist()

    def total(x: list[list[float]]) -> float:
        rows = definitions.policy_loss(cls.__name__, x, c, old, adv, mask, picked.tolist())
        return sum(weight * sum(row) for weight, row in zip(weights, rows, strict=True))

    step, want = 1e-6, torch.zeros_like(case.logps)
    for i in range(5):
        for k in range(4):
            up, down = ([row.copy() for row in c] for _ in range(2))
            up[i][k] += step
            down[i][k] -= step
            want[i, k] = (total(up) - total(down)) / (2 * step)
    torch.testing.assert_close(gradient, want, rtol=1e-6, atol=1e-7)
    assert gradient.abs().max() > 0.01


@of_every_loss
@pytest.mark.parametrize("junk", [NAN, float("inf"), -float("inf"), 1e30])
def test_numbers_off_the_mask_change_neither_loss_nor_gradient(cls: type, junk: float) -> None:
    case, loss = Case(2), make(cls)
    want = run(loss, case)
    picked, metrics = case.picked(loss), loss.metrics(case.logps, case.old, case.advantages, case.mask)
    for name in ("logps", "old", "advantages", "noise"):
        setattr(case, name, torch.where(case.mask, getattr(case, name), junk))
    assert torch.equal(case.picked(loss), picked)
    for got, expected in zip(run(loss, case), want, strict=True):
        assert torch.equal(got, expected)
        assert not got[~case.mask].any()
    again = loss.metrics(case.logps, case.old, case.advantages, case.mask)
    for name, x in metrics.items():
        assert torch.equal(again[name][case.mask], x[case.mask])


def mean_and_gradient(loss: PolicyLoss, case: Case, mode: AggregationMode) -> tuple[Tensor, Tensor]:
    """Of a whole mini-batch."""
    norm = 8 if mode == "seq-mean-token-sum-norm" else None
    weights = row_weights(case.mask, mode, norm_tokens=norm, groups_B=case.groups)
    logps = case.logps.clone().requires_grad_(True)
    losses = loss(logps, case.old, case.advantages, case.mask, case.picked(loss))
    total = aggregate(losses, case.mask, weights)
    (gradient,) = torch.autograd.grad(total, logps)
    return total.detach(), gradient


@of_every_loss
@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_observations_between_tokens_change_nothing(cls: type, mode: AggregationMode) -> None:
    """Whatever numbers stand there."""
    case, loss = Case(3), make(cls)
    wide, places = case.spread(NAN)
    assert not torch.equal(wide.mask[:, :6], case.mask)
    assert torch.equal(wide.picked(loss).gather(1, places), case.picked(loss))
    total, gradient = mean_and_gradient(loss, wide, mode)
    want, want_gradient = mean_and_gradient(loss, case, mode)
    torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient.gather(1, places), want_gradient, rtol=1e-12, atol=1e-12)
    assert not gradient[~wide.mask].any()


@of_every_loss
@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_rows_without_tokens_take_no_part(cls: type, mode: AggregationMode) -> None:
    case, loss = Case(3), make(cls)
    more = case.with_empty_rows(NAN)
    assert torch.equal(more.picked(loss)[FULL_ROWS], case.picked(loss))
    total, gradient = mean_and_gradient(loss, more, mode)
    want, want_gradient = mean_and_gradient(loss, case, mode)
    torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient[FULL_ROWS], want_gradient, rtol=1e-12, atol=1e-12)
    assert int(gradient.any(1).sum()) == int(want_gradient.any(1).sum())


@of_every_loss
@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_the_order_of_rows_and_groups_changes_no_mean(cls: type, mode: AggregationMode) -> None:
    case, loss = Case(4), make(cls)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    mixed = case.select(order)
    mixed.groups = 1000 - 7 * mixed.groups
    total, gradient = mean_and_gradient(loss, mixed, mode)
    want, want_gradient = mean_and_gradient(loss, case, mode)
    torch.testing.assert_close(total, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, want_gradient[order], rtol=1e-12, atol=1e-12)


@of_every_loss
def test_groups_of_one_row_count_like_rows(cls: type) -> None:
    case, loss = Case(4), make(cls)
    case.groups = torch.arange(7)
    got, want = (mean_and_gradient(loss, case, mode) for mode in ("prompt-mean", "seq-mean-token-mean"))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@of_every_loss
def test_equal_scores_pull_back_at_most(cls: type) -> None:
    """Without advantages nothing is learned; where the policy is still the old one, nothing moves at all."""
    case, loss = Case(5), make(cls)
    case.advantages = torch.zeros_like(case.advantages)
    _, gradient = run(loss, case)
    towards_old = torch.where(case.mask, (case.logps - case.old).sign(), 0)
    assert bool((gradient.sign() * towards_old >= 0).all())
    assert bool(gradient.any()) == (cls.__name__ in PULL_BACK)
    case.old = case.logps
    assert not run(loss, case)[1].any()


@of_every_loss
@pytest.mark.parametrize("mode", get_args(AggregationMode))
def test_a_split_into_micro_batches_gives_the_gradient_of_the_whole(cls: type, mode: AggregationMode) -> None:
    case, loss = Case(5), make(cls)
    kwargs = {"norm_tokens": 8 if mode == "seq-mean-token-sum-norm" else None, "groups_B": case.groups}
    weights, picked = row_weights(case.mask, mode, **kwargs), case.picked(loss)
    gradients = []
    for parts in ([range(7)], [[0, 3], [], [6, 1, 2], [5, 4]], [[i] for i in range(7)]):
        logps = case.logps.clone().requires_grad_(True)
        for index in map(list, parts):
            micro = case.select(index)
            losses = loss(logps[index], micro.old, micro.advantages, micro.mask, picked[index])
            aggregate(losses, micro.mask, weights[index]).backward()
        gradients.append(logps.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=1e-12, atol=1e-14)


@of_every_loss
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_two_ranks_pick_what_one_picks(cls: type, cut: int) -> None:
    case, loss = Case(6), make(cls)
    ranks = [case.select(slice(0, cut)), case.select(slice(cut, 7))]

    def pick(rank: int, gather: Any) -> Tensor:
        of = ranks[rank]
        return loss.pick(of.logps, of.old, of.advantages, of.mask, of.noise, gather)

    assert torch.equal(torch.cat(on_ranks(pick)), case.picked(loss))
    assert loss.needs_mini_batch_logps == bool(case.picked(loss).any())


@of_every_loss
@pytest.mark.parametrize(("rows", "width"), [(0, 0), (0, 3), (2, 0), (1, 1)])
def test_empty_batches_and_a_single_token(cls: type, rows: int, width: int) -> None:
    case, loss = Case(0, rows, width), make(cls)
    case.mask[:] = True
    losses, gradient = run(loss, case)
    assert losses.shape == gradient.shape == (rows, width)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


@of_every_loss
def test_a_batch_without_tokens_has_a_loss_of_zero_with_a_graph(cls: type) -> None:
    case, loss = Case(0), make(cls)
    case.mask[:] = False
    losses, gradient = run(loss, case)
    assert not losses.any()
    assert not gradient.any()
    assert not case.picked(loss).any()


@of_every_loss
def test_log_ratios_are_clamped(cls: type) -> None:
    case, loss = Case(0), make(cls)
    for far in (-1e4, 1e4):
        case.logps = case.old + far
        losses, gradient = run(loss, case)
        assert losses.isfinite().all()
        assert gradient.isfinite().all()


@of_every_loss
def test_bf16_is_computed_in_float32(cls: type) -> None:
    case, loss = Case(1, dtype=torch.bfloat16), make(cls)
    losses, _ = run(loss, case)
    assert losses.dtype == torch.float32
    for name in ("logps", "old", "advantages"):
        setattr(case, name, getattr(case, name).float())
    assert torch.equal(losses, run(loss, case)[0])


@of_every_loss
def test_only_the_current_policy_gets_a_gradient(cls: type) -> None:
    case, loss = Case(0), make(cls)
    picked = case.picked(loss)
    logps, old, advantages = (x.clone().requires_grad_(True) for x in (case.logps, case.old, case.advantages))
    loss(logps, old, advantages, case.mask, picked).sum().backward()
    assert old.grad is None
    assert advantages.grad is None
    assert not any(x.requires_grad for x in loss.metrics(logps, old, advantages, case.mask).values())


@of_every_loss
def test_shapes_must_agree(cls: type) -> None:
    case, loss = Case(0), make(cls)
    with pytest.raises(ValueError, match=r"one shape.*advantages \[7\]"):
        loss(case.logps, case.old, case.advantages[:, 0], case.mask, case.mask)
    with pytest.raises(ValueError, match=r"one shape.*mask \[7, 1\]"):
        loss(case.logps, case.old, case.advantages, case.mask[:, :1], case.mask)


# Corrections

REJECTIONS: list[Rejection] = [
    *(RatioRejection(level, 0.7, 1.4) for level in ("token", "mean", "max")),
    RatioRejection("sum", 0.2, 4.0),
    *(
        DivergenceRejection(bound, kind, level)
        for kind in ("k2", "k3")
        for level, bound in (("token", 0.05), ("mean", 0.05), ("max", 0.2), ("sum", 0.2))
    ),
]
CORRECTIONS: list[OffPolicyCorrection] = [
    *(
        TruncatedWeights(level, 1.3, normalise, [RatioRejection("token", 0.4, 3.0)])
        for level in ("token", "sequence")
        for normalise in (False, True)
    ),
    *(IcePop(level, 0.6, 1.9, normalise) for level in ("token", "sequence") for normalise in (False, True)),
    NoCorrection(),
    *(RejectOnly([rejection]) for rejection in REJECTIONS),
    RejectOnly([RatioRejection("token", 0.6, 1.6), DivergenceRejection(0.3, "k3", "max")]),
    Bypass(),
    Bypass([DivergenceRejection(0.2, "k2", "max")]),
]


def named(correction: OffPolicyCorrection) -> str:
    own = [str(x) for name, x in vars(correction).items() if name != "rejections"]
    inner = [str(x) for rejection in correction.rejections for x in vars(rejection).values()]
    return "-".join([type(correction).__name__, *own, *inner])


of_every_correction = pytest.mark.parametrize("correction", CORRECTIONS, ids=named)


def test_every_correction_and_rejection_is_tested() -> None:
    assert {type(correction) for correction in CORRECTIONS} == set(concrete(OffPolicyCorrection))
    assert {type(rejection) for rejection in REJECTIONS} == set(concrete(Rejection))


def corrected(correction: OffPolicyCorrection, case: Case, reduce: Any = None) -> tuple[Tensor | None, Tensor]:
    """The log-probs of the case as those of trainer and engine."""
    return correction(case.logps, case.old, case.mask, reduce)


def assert_same(got: tuple[Tensor | None, Tensor], want: tuple[Tensor | None, Tensor]) -> None:
    assert torch.equal(got[1], want[1])
    if want[0] is None:
        assert got[0] is None
    else:
        torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=1e-12)


@of_every_correction
@pytest.mark.parametrize("seed", range(3))
def test_a_correction_equals_its_definition(correction: Any, seed: int) -> None:
    case = Case(seed)
    weights, keep = corrected(correction, case)
    logs = [
        [float(x - o) for x, o, counts in zip(*rows, strict=True) if counts]
        for rows in zip(case.logps, case.old, case.mask, strict=True)
    ]
    kept = [[True] * len(row) for row in logs]
    for rejection in correction.rejections:
        settings = {"low": 0.0} | vars(rejection)
        kind, high = settings.get("kind", "k1"), settings.get("high", settings.get("bound"))
        for i, row in enumerate(logs):
            passed = definitions.kept_row(row, kind, settings["level"], settings["low"], high) if row else []
            kept[i] = [a and b for a, b in zip(kept[i], passed, strict=True)]
    assert keep[case.mask].tolist() == [x for row in kept for x in row]
    assert not keep[~case.mask].any()
    if not isinstance(correction, TruncatedWeights | IcePop):
        assert weights is None
        return
    rows = [definitions.ratios_of_row(row, correction.level) if row else [] for row in logs]
    if isinstance(correction, TruncatedWeights):
        rows = [[min(r, correction.cap) for r in row] for row in rows]
    else:
        rows = [[r if correction.low <= r <= correction.high else 0.0 for r in row] for row in rows]
    if correction.normalise:
        of_kept = [[w for w, k in zip(*both, strict=True) if k] for both in zip(rows, kept, strict=True)]
        counted = [w for row in of_kept for w in (row if correction.level == "token" else row[:1])]
        rows = [[w / (sum(counted) / len(counted)) for w in row] for row in rows]
    want = torch.tensor([w for row in rows for w in row], dtype=torch.float64)
    torch.testing.assert_close(weights[case.mask], want, rtol=1e-8, atol=1e-8)


def test_the_cases_above_reject_some_tokens_and_keep_others() -> None:
    for correction in CORRECTIONS:
        kept = [corrected(correction, Case(seed))[1].sum() for seed in range(3)]
        tokens = [Case(seed).mask.sum() for seed in range(3)]
        if correction.rejections:
            assert 0 < sum(kept) < sum(tokens), named(correction)
        else:
            assert kept == tokens


@of_every_correction
@pytest.mark.parametrize("junk", [NAN, float("inf"), 1e30])
def test_numbers_off_the_action_mask_do_not_matter(correction: Any, junk: float) -> None:
    case = Case(1)
    want = corrected(correction, case)
    for name in ("logps", "old"):
        setattr(case, name, torch.where(case.mask, getattr(case, name), junk))
    got = corrected(correction, case)
    assert_same(got, want)
    for x in got:
        assert x is None or not x[~case.mask].any()


@of_every_correction
def test_order_and_padding_do_not_matter(correction: Any) -> None:
    case = Case(2)
    weights, keep = corrected(correction, case)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    assert_same(corrected(correction, case.select(order)), (None if weights is None else weights[order], keep[order]))
    wide = corrected(correction, case.padded(3, NAN))
    assert_same((None if wide[0] is None else wide[0][:, :6], wide[1][:, :6]), (weights, keep))
    assert not wide[1][:, 6:].any()


@of_every_correction
def test_corrections_skip_observations_and_empty_rows(correction: Any) -> None:
    case = Case(2)
    weights, keep = corrected(correction, case)
    wide, places = case.spread(NAN)
    got = corrected(correction, wide)
    assert not got[1][~wide.mask].any()
    assert_same((None if got[0] is None else got[0].gather(1, places), got[1].gather(1, places)), (weights, keep))
    more = corrected(correction, case.with_empty_rows(NAN))
    assert_same((None if more[0] is None else more[0][FULL_ROWS], more[1][FULL_ROWS]), (weights, keep))
    assert int(more[1].sum()) == int(keep.sum())


@of_every_correction
@pytest.mark.parametrize("cut", [0, 2, 5])
def test_two_ranks_correct_as_one(correction: Any, cut: int) -> None:
    case = Case(3)
    ranks = [case.select(slice(0, cut)), case.select(slice(cut, 7))]
    parts = on_ranks(lambda rank, gather: corrected(correction, ranks[rank], summed(gather)))
    weights = [w for w, _ in parts if w is not None]
    assert_same(
        (torch.cat(weights) if weights else None, torch.cat([k for _, k in parts])), corrected(correction, case)
    )


@of_every_correction
@pytest.mark.parametrize(("rows", "width"), [(0, 0), (0, 3), (2, 0), (1, 1)])
def test_corrections_of_empty_rollouts(correction: Any, rows: int, width: int) -> None:
    case = Case(0, rows, width)
    case.mask[:] = True
    weights, keep = corrected(correction, case)
    assert keep.shape == (rows, width)
    assert weights is None or weights.isfinite().all()


@of_every_correction
def test_equal_log_probs_are_left_alone(correction: Any) -> None:
    case = Case(0)
    case.old = case.logps
    weights, keep = corrected(correction, case)
    assert torch.equal(keep, case.mask)
    assert weights is None or torch.equal(weights, case.mask.double())


@of_every_correction
def test_far_log_probs_stay_finite_in_float32(correction: Any) -> None:
    for far in (-1e4, 1e4):
        case = Case(0, dtype=torch.float32)
        case.logps = case.old + far
        weights, _ = corrected(correction, case)
        assert weights is None or weights.isfinite().all()


@of_every_correction
def test_corrections_of_bf16_are_computed_in_float32_and_have_no_gradient(correction: Any) -> None:
    case = Case(1, dtype=torch.bfloat16)
    case.logps.requires_grad_(True)
    weights, keep = corrected(correction, case)
    for name in ("logps", "old"):
        setattr(case, name, getattr(case, name).float())
    assert_same((weights, keep), corrected(correction, case))
    assert weights is None or (weights.dtype == torch.float32 and not weights.requires_grad)
