"""Estimators agree with the formulas, token by token, on ragged episodes with observations inside."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from lightning_agentrl.advantages import AdvantageEstimator
from tests.advantages.cases import build, draw_episodes
from tests.advantages.definitions import DEFINITIONS, VARIANTS

CASES = [(cls, arguments) for cls in DEFINITIONS for arguments in ({}, *VARIANTS[cls])]
SEEDS = range(25)


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else ",".join(value) or "defaults"


@pytest.mark.parametrize("seeds", [SEEDS[:4], pytest.param(SEEDS[4:], marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize(("cls", "arguments"), CASES, ids=name_of)
@pytest.mark.filterwarnings("ignore:.*hold a single episode")
def test_equals_the_definition(cls: type[AdvantageEstimator], arguments: dict[str, Any], seeds: range):
    for seed in seeds:
        for dense in (False, True):
            episodes = draw_episodes(seed, dense, least=0.0 if cls.needs_nonnegative_scores else -0.5)
            built = build(episodes, one_row=seed % 2 == 0, seed=seed, noise=float("nan"), padding=1)
            got = [built.read(x) for x in cls(**arguments).estimate(built.rollout)]
            want = DEFINITIONS[cls](episodes, **arguments)
            for i, tokens in enumerate(want):
                for part in (0, 1):
                    assert got[part][i] == pytest.approx([numbers[part] for numbers in tokens], rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("cls", DEFINITIONS, ids=name_of)
def test_variants_set_every_argument_to_another_value(cls: type[AdvantageEstimator]):
    parameters = {p.name: p.default for p in inspect.signature(cls).parameters.values() if p.name != "whiten"}
    for name, default in parameters.items():
        assert any(arguments.get(name, default) != default for arguments in VARIANTS[cls]), name


def test_the_episodes_have_what_estimators_stumble_over():
    """Empty turns and episodes, groups of one, ties, cut episodes, missing turn numbers, states met twice."""
    drawn = [draw_episodes(seed) for seed in SEEDS]
    every = [episode for episodes in drawn for episode in episodes]
    assert any(not visit.tokens for episode in every for visit in episode.visits)
    assert any(not episode.tokens for episode in every)
    assert any(not episode.terminated for episode in every)
    assert any(len({e.group for e in episodes}) > 1 for episodes in drawn)
    sizes = [[e.group for e in episodes].count(episodes[0].group) for episodes in drawn]
    assert {1, 5} <= set(sizes)
    assert any(len({v.observation for v in e.reached}) < len(e.reached) for e in every)
