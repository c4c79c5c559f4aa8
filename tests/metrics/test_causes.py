"""Causes of a gap: synthetic log-probs with a known fault in, the fault out; rounding and chance are none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_agentrl.metrics.causes import Distributions, Evidence, kept_prefix, likely_cause, surprise
from lightning_agentrl.metrics.gap import EXACT, JUMP, ROUGH, GapWatch, bounds_for

TOKENS, VOCABULARY = 600, 50


def distributions(seed: int, sharpness: float = 1.5) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(TOKENS, VOCABULARY, generator=random, dtype=torch.float64)).log_softmax(-1)


def draw(log_pi: Tensor, seed: int) -> Tensor:
    return torch.multinomial(log_pi.exp(), 1, generator=torch.Generator().manual_seed(seed + 10**6))[:, 0]


def taken(log_pi: Tensor, tokens: Tensor) -> Tensor:
    return log_pi.gather(-1, tokens[:, None])[:, 0]


def cut_p(log_pi: Tensor, share: float) -> Tensor:
    values, order = log_pi.exp().sort(-1, descending=True)
    return log_pi.masked_fill(
        (values.cumsum(-1) - values >= share).gather(-1, order.argsort(-1)), -torch.inf
    ).log_softmax(-1)


def cut_k(log_pi: Tensor, k: int) -> Tensor:
    return log_pi.masked_fill(log_pi < log_pi.topk(k).values[:, -1:], -torch.inf).log_softmax(-1)


def case(
    log_pi: Tensor, drawn: Tensor, said: Tensor, seed: int, temperature: float = 1.0
) -> tuple[Evidence, Distributions]:
    """What is seen if tokens are drawn from one distribution, and the engine tells the log-probs of another."""
    tokens = draw(drawn, seed)
    random = torch.Generator().manual_seed(seed)
    engine = taken(said, tokens)
    seen = Evidence(
        engine,
        taken(log_pi, tokens),
        -(log_pi.exp() * log_pi).sum(-1),
        fresh=torch.arange(TOKENS) % 2 == 0,
        repeated=torch.rand(TOKENS, generator=random) < 0.3,
    )
    few = slice(0, 150)
    return seen, Distributions(log_pi[few], tokens[few], engine[few], temperature)


seeds = st.integers(0, 10**6)


@settings(max_examples=30)
@given(seed=seeds, rounding=st.floats(1e-7, 3e-5))
def test_an_engine_that_is_right_fits(seed: int, rounding: float) -> None:
    log_pi = distributions(seed)
    noise = rounding * torch.randn(TOKENS, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    seen, _ = case(log_pi, log_pi, log_pi + noise, seed)
    assert seen.fits(EXACT)
    assert abs(surprise(seen)) < 5


@settings(max_examples=15)
@given(seed=seeds, factor=st.sampled_from([0.5, 0.8, 0.95, 1.05, 1.3, 2.0]), own=st.sampled_from([0.7, 1.0]))
def test_a_temperature_is_fitted(seed: int, factor: float, own: float) -> None:
    log_pi = distributions(seed)
    other = (log_pi / factor).log_softmax(-1)
    seen, whole = case(log_pi, other, other, seed, own)
    assert not seen.fits(EXACT)
    assert f"temperature {factor * own:.3g}, the trainer's of {own:g}" in likely_cause(seen, EXACT, whole, {})


@settings(max_examples=15)
@given(seed=seeds, share=st.sampled_from([0.5, 0.8, 0.9, 0.95]))
def test_top_p_is_found(seed: int, share: float) -> None:
    log_pi = distributions(seed)
    other = cut_p(log_pi, share)
    seen, whole = case(log_pi, other, other, seed)
    assert not seen.fits(EXACT)
    assert f"top-p of about {share:g}" in likely_cause(seen, EXACT, whole, {})


@settings(max_examples=15)
@given(seed=seeds, k=st.sampled_from([2, 5, 20, 40]))
def test_top_k_is_found(seed: int, k: int) -> None:
    log_pi = distributions(seed)
    other = cut_k(log_pi, k)
    seen, whole = case(log_pi, other, other, seed)
    assert not seen.fits(EXACT)
    assert f"top-k of about {k}" in likely_cause(seen, EXACT, whole, {})


@pytest.mark.parametrize("seed", range(5))
def test_sampling_is_found_where_the_log_probs_are_right(seed: int) -> None:
    log_pi = distributions(seed)
    for other, message in {
        cut_p(log_pi, 0.8): "look like top-p of about 0.8",
        cut_k(log_pi, 8): "look like top-k of about 8",
        (log_pi / 0.7).log_softmax(-1): "temperature 0.",
        (log_pi / 1.5).log_softmax(-1): "temperature 1.",
    }.items():
        seen, whole = case(log_pi, other, log_pi, seed)
        assert EXACT.hold(seen.mean, seen.largest)
        assert not seen.fits(EXACT)
        assert message in likely_cause(seen, EXACT, whole, {})


def test_a_penalty_is_found() -> None:
    log_pi = distributions(1)
    seen, whole = case(log_pi, log_pi, log_pi, 1)
    engine = torch.where(seen.repeated, seen.trainer - 0.7, seen.trainer + 0.2)
    assert "penalty" in likely_cause(replace(seen, engine=engine), EXACT, replace(whole, engine=engine[:150]), {})


def test_older_weights_a_kept_cache_and_a_missing_tensor_are_told_apart() -> None:
    log_pi, older = distributions(1), distributions(2)
    seen, whole = case(log_pi, older, older, 3)
    before = seen.engine + 1e-6
    assert "one version behind" in likely_cause(replace(seen, older=before), EXACT, whole, {})
    assert "no update" in likely_cause(replace(seen, older=before, unmoved=True), EXACT, whole, {})
    kept = torch.where(seen.fresh, seen.trainer, seen.engine)
    cached = replace(seen, engine=kept, older=seen.trainer - 1.0)
    assert "prefix cache" in likely_cause(cached, EXACT, replace(whole, engine=kept[:150]), {})
    by_kind = {"mlp.up_proj": 1e-6, "norm": 0.9}
    assert "mlp.up_proj is not taken over" in likely_cause(replace(seen, older=seen.trainer), EXACT, whole, by_kind)
    assert "other weights" in likely_cause(replace(seen, older=seen.trainer), EXACT, whole, {"norm": 0.9})


def test_a_kept_cache_shows_in_the_mean_gap_of_replies_that_begin_like_others() -> None:
    """Many of them whose gaps are all within the bound are no sign of it, nor are fresh ones that are off too."""
    fresh, zeros = torch.arange(100) < 50, torch.zeros(100, dtype=torch.float64)
    seen = Evidence(zeros, zeros, zeros, fresh, fresh)
    for of_fresh, of_others, kept in ((0.0, 0.09, False), (0.0, 0.11, True), (0.11, 0.2, False)):
        gaps = torch.where(fresh, of_fresh, of_others)
        assert kept_prefix(replace(seen, engine=gaps), ROUGH) == kept
        assert not kept_prefix(replace(seen, engine=gaps, fresh=torch.ones_like(fresh)), ROUGH)


def test_rounding_of_16_bits_is_told_as_precision() -> None:
    log_pi = distributions(4)
    seen, whole = case(log_pi, log_pi, log_pi, 4)
    rounded = seen.engine + 0.02 * torch.randn(TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert "precision" in likely_cause(replace(seen, engine=rounded), EXACT, replace(whole, engine=rounded[:150]), {})
    assert replace(seen, engine=rounded).fits(ROUGH)


@pytest.mark.parametrize(("side", "message"), [("engine", "the engine gives"), ("trainer", "the trainer's")])
def test_what_is_not_a_number_never_fits_and_is_told(side: str, message: str) -> None:
    log_pi = distributions(5)
    seen, whole = case(log_pi, log_pi, log_pi, 5)
    spoilt = getattr(seen, side).clone()
    spoilt[7] = torch.nan
    seen = replace(seen, **{side: spoilt})
    assert not seen.fits(ROUGH)
    assert message in likely_cause(seen, ROUGH, whole, {})


def test_parts_of_several_ranks_are_one() -> None:
    log_pi = distributions(6)
    seen, _ = case(log_pi, log_pi, log_pi, 6)
    both = Evidence.together([replace(seen, unmoved=True), seen])
    assert len(both) == 2 * TOKENS
    assert both.older is None
    assert not both.unmoved
    assert (both.mean, both.largest) == (seen.mean, seen.largest)


def test_bounds_follow_the_lower_precision() -> None:
    assert bounds_for("auto", "torch.float32") == bounds_for("float32", "torch.float64") == EXACT
    assert bounds_for("bfloat16", "torch.float32") == bounds_for("auto", "torch.bfloat16") == ROUGH
    assert bounds_for("float16", "torch.float32") == ROUGH
    assert not EXACT.hold(float("nan"), 0.0)


def test_a_watch_stops_beyond_the_bound_and_tells_a_jump() -> None:
    watch = GapWatch(EXACT)
    assert [watch.judge(mean, older=False) for mean in (4e-6, 5e-6, 4e-6)] == ["", "", ""]
    assert watch.judge(JUMP * 1e-5, older=False) == "jump"
    assert watch.usual == 4e-6
    assert watch.judge(1.1e-4, older=False) == "beyond"
    assert watch.judge(float("nan"), older=False) == ""


def test_rollouts_of_older_weights_are_measured_against_those_before() -> None:
    watch = GapWatch(EXACT)
    assert watch.judge(1e-6, older=False) == ""  # the first rollout of a run
    assert [watch.judge(mean, older=True) for mean in (0.02, 0.03, 0.02, 0.05)] == [""] * 4
    assert watch.judge(0.3, older=True) == "jump"


@pytest.mark.parametrize("likeliest", [None, 10.0, 20.0], ids=["uniform", "nearly certain", "certain"])
def test_tokens_of_flat_and_of_certain_distributions_fit(likeliest: float | None) -> None:
    """All are alike, so the scale of what was drawn is rounding, or knows nothing of what is rarely drawn."""
    logits = torch.zeros(TOKENS, 384)
    if likeliest is not None:
        logits[:, 7] = likeliest + math.log(384)
    log_pi = logits.log_softmax(-1)
    seen, _ = case(log_pi, log_pi.double(), log_pi, seed=0)
    assert seen.fits(EXACT)
