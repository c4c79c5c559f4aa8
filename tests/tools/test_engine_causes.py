"""Rules of sampling are found from log-probs: a known rule in, its name out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_agentrl.tools.engine_causes import best_rule, older_parts

TOKENS, VOCABULARY = 300, 50


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


def rule_of(log_pi: Tensor, other: Tensor, seed: int, own: float = 1.0, reported: bool = True) -> str:
    """Return the rule that is found if tokens are drawn from another distribution, and whose log-probs are reported."""
    tokens = draw(other, seed)
    engine = taken(other, tokens)

    def distance(predicted: Tensor) -> float:
        return float((engine - predicted).abs().mean())

    def unlikely(predicted: Tensor) -> float:
        return -float(predicted.mean())

    cost: Callable[[Tensor], float] = distance if reported else unlikely
    return best_rule(log_pi, tokens, own, cost)[1]


seeds = st.integers(0, 10**6)


@settings(max_examples=5, deadline=None)
@given(seed=seeds, factor=st.sampled_from([0.5, 0.8, 0.95, 1.05, 1.3, 2.0]), own=st.sampled_from([0.7, 1.0]))
def test_a_temperature_is_fitted(seed: int, factor: float, own: float) -> None:
    log_pi = distributions(seed)
    found = rule_of(log_pi, (log_pi / factor).log_softmax(-1), seed, own)
    assert found == f"temperature {factor * own:.3g}, the trainer's is {own:g}"


@settings(max_examples=5, deadline=None)
@given(seed=seeds, share=st.sampled_from([0.5, 0.8, 0.9, 0.95]))
def test_top_p_is_found(seed: int, share: float) -> None:
    log_pi = distributions(seed)
    assert rule_of(log_pi, cut_p(log_pi, share), seed) == f"top-p of about {share:g}"


@settings(max_examples=5, deadline=None)
@given(seed=seeds, k=st.sampled_from([2, 5, 20, 40]))
def test_top_k_is_found(seed: int, k: int) -> None:
    log_pi = distributions(seed)
    assert rule_of(log_pi, cut_k(log_pi, k), seed) == f"top-k of about {k}"


@pytest.mark.parametrize("seed", range(3))
def test_rules_are_found_if_the_whole_distribution_is_reported(seed: int) -> None:
    log_pi = distributions(seed)
    for other, message in {
        cut_p(log_pi, 0.8): "top-p of about 0.8",
        cut_k(log_pi, 8): "top-k of about 8",
        (log_pi / 0.7).log_softmax(-1): "temperature 0.",
        (log_pi / 1.5).log_softmax(-1): "temperature 1.",
    }.items():
        assert message in rule_of(log_pi, other, seed, reported=False)


def test_parts_are_all_weights_kinds_and_tensors() -> None:
    names = ["model.embed.weight", *(f"model.layers.{i}.mlp.{x}.weight" for i in (0, 1) for x in ("up", "down"))]
    assert {cause.partition(" is not")[0]: len(members) for members, cause in older_parts(names)} == {
        "the engine is one version behind: it samples from the weights before the last update": 5,
        "model.embed.weight": 1,
        "model.layers.*.mlp.up.weight": 2,
        "model.layers.*.mlp.down.weight": 2,
        **dict.fromkeys(names, 1),
    }
