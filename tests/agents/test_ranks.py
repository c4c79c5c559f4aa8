"""Two processes make of a rollout the update that one makes: whatever estimates, corrects, filters and loses."""

from __future__ import annotations

import inspect
import os
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_agentrl.losses import GroupFilter
from tests.agents import two_ranks
from tests.agents.two_ranks import ESTIMATORS, FILTERS, STEPS, Report
from tests.losses.test_conformance import CORRECTIONS, named
from tests.started import together

pytestmark = pytest.mark.slow  # two processes

PREPARED = [
    *(f"estimator {name}{more}" for name in ESTIMATORS for more in ("", ", rejecting")),
    *(f"correction {named(correction)}" for correction in CORRECTIONS),
    *(f"filter {name}" for name in FILTERS),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, exact_folder: Path) -> list[Report]:
    """What each of two processes found out."""
    folder = tmp_path_factory.mktemp("ranks")
    together(2, two_ranks.run, str(folder), str(exact_folder))
    return [Report(**torch.load(folder / f"{rank}.pt")) for rank in range(2)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, exact_folder: Path) -> Report:
    """What a single process finds out."""
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return two_ranks.fit(tmp_path_factory.mktemp("rank"), str(exact_folder), devices=1)


def test_both_have_a_share_of_the_episodes(one: Report, two: list[Report]) -> None:
    """Groups are not divided; episodes differ in length, and so do the shares."""
    first, second = (process.tokens["estimator GRPO"].keys() for process in two)
    assert not first & second
    assert first | second == one.tokens["estimator GRPO"].keys()
    groups = [{env // 3 for env, _ in places} for places in (first, second)]
    assert sorted(groups[0] | groups[1]) == [0, 1, 2, 3]
    assert not groups[0] & groups[1]
    assert len(first) != len(second)


def test_everything_there_is_takes_part(one: Report) -> None:
    assert set(PREPARED) == one.tokens.keys()
    assert set(STEPS) == one.gradients.keys() == one.numbers.keys() - set(PREPARED)
    filters = {type(group_filter) for group_filter in two_ranks.FILTERS.values()}
    ours = {cls for cls in GroupFilter.__subclasses__() if cls.__module__.startswith("lightning_agentrl.")}
    assert filters == {cls for cls in ours if not inspect.isabstract(cls)}


# Loops, not cases: the cases of a module are dealt out, and each worker that gets one would train all of this anew.


def test_tokens_get_from_two_processes_what_they_get_from_one(one: Report, two: list[Report]) -> None:
    for name in PREPARED:
        got = two[0].tokens[name] | two[1].tokens[name]
        assert got.keys() == one.tokens[name].keys(), name
        for place, want in one.tokens[name].items():
            torch.testing.assert_close(got[place], want, rtol=1e-9, atol=1e-9, msg=partial(named_fault, name))
        assert len(torch.cat(list(got.values())).unique(dim=0)) > 1 or "correction" in name, name


def test_what_is_logged_is_of_both_processes(one: Report, two: list[Report]) -> None:
    for name in (name for name in (*PREPARED, *STEPS) if "correction" not in name):
        for process in two:
            assert process.numbers[name] == pytest.approx(one.numbers[name], rel=1e-8, abs=1e-10, nan_ok=True), name


def test_gradients_of_two_processes_are_those_of_one(one: Report, two: list[Report]) -> None:
    """Summed over ranks although each has another number of tokens, rows and groups."""
    for name in STEPS:
        want = one.gradients[name]
        assert max(float(gradient.abs().max()) for gradient in want.values()) > 1e-4, name
        for process in two:
            assert process.gradients[name].keys() == want.keys(), name
            for parameter, gradient in want.items():
                found, told = process.gradients[name][parameter], partial(named_fault, f"{name}, {parameter}")
                torch.testing.assert_close(found, gradient, rtol=1e-8, atol=1e-10, msg=told)


def named_fault(name: str, fault: str) -> str:
    return f"{name}: {fault}"
