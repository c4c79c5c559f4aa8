"""What holds for every estimator of the package. A new one enters by existing; it also needs a definition."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_agentrl.advantages import (
    AdvantageEstimator,
    OptimalTokenBaseline,
    Reduce,
    ScoreEstimator,
    whiten,
)
from lightning_agentrl.types import Rollout, Scores
from tests.advantages.cases import Built, Episode, Token, Visit, build, draw_episodes, only, simple, with_scores
from tests.advantages.definitions import DEFINITIONS, VARIANTS
from tests.advantages.ranks import on_two_ranks

NAN = float("nan")
SEED = st.integers(0, 2**31)


def concrete(base: type) -> set[type]:
    found = {cls for sub in base.__subclasses__() for cls in (sub, *concrete(sub))}
    return {cls for cls in found if cls.__module__.startswith("lightning_agentrl.") and not inspect.isabstract(cls)}


def called(x: Any) -> str:
    return x.__name__ if isinstance(x, type) else ",".join(x) or "defaults"


CLASSES = sorted(concrete(AdvantageEstimator), key=called)
CASES = [
    *((cls, {}) for cls in CLASSES),
    *(pytest.param(cls, variant, marks=pytest.mark.slow) for cls in CLASSES for variant in VARIANTS.get(cls, [])),
]
of_every_estimator = pytest.mark.parametrize(("cls", "arguments"), CASES, ids=called)
of_every_class = pytest.mark.parametrize("cls", CLASSES, ids=called)
of_group_estimators = pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls.needs_groups], ids=called)
of_score_estimators = pytest.mark.parametrize(
    "cls", [cls for cls in CLASSES if issubclass(cls, ScoreEstimator)], ids=called
)
pytestmark = pytest.mark.filterwarnings("ignore:.*hold a single episode")


def run(estimator: AdvantageEstimator, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
    """As the agent does it."""
    advantages, returns = estimator.estimate(rollout, reduce)
    return whiten(advantages, rollout.trained_mask, reduce) if estimator.whiten else advantages, returns


def numbers(estimator: AdvantageEstimator, built: Built) -> list[list[list[float]]]:
    """Advantages and returns by episode and token, with exact zeros elsewhere."""
    return [built.read(x) for x in run(estimator, built.rollout)]


def assert_same(got: Sequence[Sequence[Sequence[float]]], want: Sequence[Sequence[Sequence[float]]]) -> None:
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x == pytest.approx(y, rel=1e-9, abs=1e-9)


def drawn(cls: type[AdvantageEstimator], seed: int) -> list[Episode]:
    return draw_episodes(seed, dense=seed % 2 == 0, least=0.0 if cls.needs_nonnegative_scores else -0.5)


def test_every_estimator_is_here_and_defined():
    assert set(CLASSES) == set(DEFINITIONS) == set(VARIANTS)
    assert len(CLASSES) >= 18


@of_every_class
def test_what_it_needs_is_refused_where_it_is_missing(cls: type[AdvantageEstimator]):
    rollout = build(draw_episodes(1)).rollout
    bare = Rollout(
        *(getattr(rollout, name) for name in ("samples", "action_mask", "turn_ids", "rewards", "rollout_logps")),
        episode=rollout.episode,
        terminated=rollout.terminated,
    )
    needs = {
        "needs_values": {"scores.values", "bootstrap_values"},
        "needs_groups": {"groups"},
        "needs_sum_pi_squared": {"scores.sum_pi_squared"},
        "needs_greedy_baseline": {"greedy_scores"},
        "needs_forks": {"state_values", "forked_end_values"},
    }
    missing = set().union(*(names for need, names in needs.items() if getattr(cls(), need)))
    if not missing:
        cls().estimate(bare)
        return
    with pytest.raises(ValueError, match=f"{cls.__name__}") as error:
        cls().estimate(bare)
    assert all(name in str(error.value) for name in missing)


@of_every_class
def test_discounts_and_epsilons_out_of_range_are_refused_by_their_names(cls: type[AdvantageEstimator]):
    for name in inspect.signature(cls).parameters:
        fraction = name.split("_")[0] in ("gamma", "lam", "similarity")
        for value in (-0.1, 1.1, NAN) if fraction else (-0.1, 0.0, NAN) if name == "eps" else ():
            with pytest.raises(ValueError, match=rf"\b{name}\b.* (0 and 1|above 0), got {value}"):
                cls(**{name: value})


@of_every_class
def test_it_tells_the_discounts_of_its_returns(cls: type[AdvantageEstimator]):
    """By them an audit judges. Two tokens, in two turns or in one; the value behind the first is the true one."""
    first, last, metrics = Token(), Token(1.0, 1.0), {"format": 1.0}
    two = Visit(0, (first,), metrics=metrics), Visit(1, (last,), metrics=metrics)
    one = (Visit(0, (first, last), metrics=metrics),)
    for arguments in ({}, *VARIANTS.get(cls, [])):
        if "weights" not in arguments:  # whose returns have a unit of their own
            estimator = cls(**arguments)
            for turns, discount in ((two, estimator.turn_discount), (one, estimator.token_discount)):
                built = build([Episode(0, turns), Episode(0, turns)])
                returns = built.read(estimator.estimate(built.rollout)[1])[0]
                assert returns == pytest.approx([discount, 1.0])


# What must not matter


@of_every_estimator
@settings(max_examples=2)
@given(seed=SEED)
def test_layouts_observations_padding_and_order(cls: type[AdvantageEstimator], arguments: dict[str, Any], seed: int):
    """One row per episode or per turn; observations between tokens; padding; numbers off the mask; rows and labels."""
    episodes, estimator = drawn(cls, seed), cls(**arguments)
    want = numbers(estimator, build(episodes))
    for changed in (
        build(episodes, noise=NAN),
        build(episodes, noise=float("inf"), padding=3),
        build(episodes, seed=seed, noise=NAN),
        build(episodes, one_row=False),
        build(episodes, one_row=False, seed=seed, noise=NAN, padding=2, empty_rows=2),
        build(episodes, relabel=True),
        build(episodes, empty_rows=3, noise=NAN),
    ):
        assert_same(numbers(estimator, changed), want)


@of_every_estimator
@settings(max_examples=2)
@given(seed=SEED)
def test_two_ranks_equal_one(cls: type[AdvantageEstimator], arguments: dict[str, Any], seed: int):
    """Groups are whole on a rank; one rank may have none of them."""
    episodes = drawn(cls, seed)
    labels = sorted({episode.group for episode in episodes})
    shares = [set(labels[: seed % (len(labels) + 1)]), set(labels[seed % (len(labels) + 1) :])]
    parts = [build(only(episodes, share), seed=seed) for share in shares]

    def on_rank(rank: int, reduce: Reduce) -> list[list[list[float]]]:
        return [parts[rank].read(x) for x in run(cls(**arguments), parts[rank].rollout, reduce)]

    first, second = on_two_ranks(on_rank)
    whole = [episode for share in shares for episode in only(episodes, share)]
    assert_same([a + b for a, b in zip(first, second, strict=True)], numbers(cls(**arguments), build(whole)))


@of_every_estimator
def test_bf16_is_upcast_and_no_gradient_passes(cls: type[AdvantageEstimator], arguments: dict[str, Any]):
    rollout = build(drawn(cls, 4), dtype=torch.bfloat16).rollout
    for x in (rollout.rewards, rollout.scores.values, rollout.scores.old_logps, rollout.scores.sum_pi_squared):
        assert x is not None
        x.requires_grad_(True)
    tensors = rollout.tensors.items()
    wide = rollout.with_tensors({name: x.detach().float() for name, x in tensors if x.is_floating_point()})
    for got, want in zip(run(cls(**arguments), rollout), run(cls(**arguments), wide), strict=True):
        assert got.dtype == want.dtype == torch.float32
        assert not got.requires_grad
        assert torch.equal(got, want)


@of_group_estimators
@settings(max_examples=3)
@given(seed=SEED)
def test_an_episode_that_was_rejected_is_compared_with_nobody(cls: type[AdvantageEstimator], seed: int):
    """It gets nothing, and the others what they would get without it. One trained token makes it count again, but for
    estimators that weigh episodes by their trained tokens.
    """
    episodes, estimator = drawn(cls, seed), cls()
    built = build(episodes, one_row=False, seed=seed)
    out = random.Random(seed).randrange(len(episodes))
    mask = built.rollout.action_mask.clone()
    for place in built.places[out]:
        mask[place] = False
    rest = build([e for i, e in enumerate(episodes) if i != out])
    got = [built.read(x) for x in run(estimator, built.rollout.union(loss_mask=mask))]
    assert [of_episode.pop(out) for of_episode in got] == [[0.0] * len(built.places[out])] * 2
    assert_same(got, numbers(estimator, rest))
    if cls.__name__ in ("OPO", "OptimalTokenBaseline"):
        return
    if built.places[out]:
        mask[built.places[out][0]] = True
    both = [estimator.estimate(rollout) for rollout in (built.rollout.union(loss_mask=mask), built.rollout)]
    assert all(torch.equal(x, y) for x, y in zip(*both, strict=True))


# Edges


@of_every_estimator
@pytest.mark.parametrize("size", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_sampled_gives_zeros(cls: type[AdvantageEstimator], arguments: dict[str, Any], size: tuple[int, int]):
    rollout = build([], empty_rows=0).rollout if not size[0] else build(drawn(cls, 1)).rollout.select([0, 1])
    wide = torch.full(size, NAN, dtype=torch.float64)
    empty = replace(
        rollout,
        action_mask=torch.zeros(size, dtype=torch.bool),
        turn_ids=torch.full(size, -1),
        rewards=wide,
        rollout_logps=wide,
        weights=wide,
        state_values=wide,
        scores=Scores(old_logps=wide, values=wide, sum_pi_squared=wide),
    )
    for x in run(cls(**arguments), empty):
        assert torch.equal(x, torch.zeros(size, dtype=torch.float64))


@of_every_estimator
def test_one_token(cls: type[AdvantageEstimator], arguments: dict[str, Any]):
    """Whitening leaves a single number as it is."""
    (episode,) = [e for e in drawn(cls, 3) if e.tokens][:1]
    token = build([episode]).rollout
    mask = torch.zeros_like(token.action_mask)
    mask[0, int(token.action_mask[0].int().argmax())] = True
    for x in run(cls(**arguments), token.union(action_mask=mask)):
        assert bool(x.isfinite().all())
        assert int((x != 0).sum()) <= 1


@of_every_estimator
def test_a_row_that_lost_its_tokens_takes_no_part(cls: type[AdvantageEstimator], arguments: dict[str, Any]):
    """Rejected tokens are off the mask; an episode without others is gone from its group, too."""
    episodes = [e for e in drawn(cls, 8) if e.tokens]
    whole = build(episodes)
    lost = whole.rollout.action_mask.clone()
    lost[1] = False
    got = run(cls(**arguments), whole.rollout.union(action_mask=lost))
    without = build(episodes[:1] + episodes[2:])
    want = numbers(cls(**arguments), without)
    kept = [places for i, places in enumerate(whole.places) if i != 1]
    assert_same([[[float(x[r, c]) for r, c in places] for places in kept] for x in got], want)
    assert not any(x[1].any() for x in got)


@of_group_estimators
def test_episodes_that_are_alike_teach_nothing(cls: type[AdvantageEstimator]):
    one = Episode(0, (Visit(0, (Token(0.3), Token()), "a door", {}), Visit(1, (Token(1.0),), "a wall", {})))
    for advantages in numbers(cls(whiten=False), build([one] * 4))[0]:
        assert advantages == pytest.approx([0.0] * 3, abs=1e-6)  # an optimal baseline has an epsilon


@of_group_estimators
def test_it_tells_whether_a_small_difference_counts_as_much_as_a_large_one(cls: type[AdvantageEstimator]):
    """By it a KL in the reward is warned of."""
    given = inspect.signature(cls).parameters
    for arguments in ({}, *({"divide_by_std": by_std} for by_std in (True, False) if "divide_by_std" in given)):
        estimator = cls(whiten=False, **arguments)
        small, large = (numbers(estimator, build(simple(1.0, 1.0 + d)))[0][1][0] for d in (0.001, 1.0))
        assert estimator.divide_by_std == (small == pytest.approx(large, rel=0.01))


@of_score_estimators
def test_equal_scores_teach_nothing_whatever_the_lengths(cls: type[AdvantageEstimator]):
    for score in (0.0, 0.1, 1 / 3, 1e6):
        advantages, returns = numbers(cls(), build(with_scores(drawn(cls, 5), score)))
        assert all(not any(of_episode) for of_episode in advantages)
        assert all(x == pytest.approx(score) for of_episode in returns for x in of_episode)


@of_score_estimators
def test_scores_that_differ_by_rounding_are_equal(cls: type[AdvantageEstimator]):
    """0.1 + 0.2 and 0.3 in float32: a standard deviation of 1e-8 would make advantages of it."""
    built = build(simple(0.0, 0.0, tokens=2), dtype=torch.float32)
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0]])
    assert float(rewards[0].double().sum()) != float(rewards[1].double().sum())
    assert not cls(whiten=False).estimate(built.rollout.union(rewards=rewards))[0].any()


@pytest.mark.parametrize("total", [0.0, 0.1])
@of_group_estimators
def test_sums_may_differ_by_the_rounding_of_what_they_are_made_of(cls: type[AdvantageEstimator], total: float):
    """Rewards of tens in float32 whose sums are all 0 or 0.1: what is left of them is not small beside such a sum."""
    first, half = torch.tensor([[30.1, 10.7], [20.3, 40.9], [0.0, 0.0]], dtype=torch.float64).T
    rewards = torch.stack([first, half - first, total - half], 1).float()
    assert float(rewards.double().sum(1).diff().abs().max()) > 1e-6 * max(total, 1e-3)
    turns = Visit(0, (Token(), Token(), Token()), metrics={"format": 1.0})
    built = build([Episode(0, (turns,))] * 3, dtype=torch.float32)
    if not cls.needs_sum_pi_squared:  # whose baseline is that of tokens
        assert not cls(whiten=False).estimate(built.rollout.union(rewards=rewards))[0].any()


@of_group_estimators
def test_a_group_of_one_is_warned_of_once(cls: type[AdvantageEstimator]):
    built = build(simple(1.0, tokens=3))
    always_raw = cls is OptimalTokenBaseline
    choices: list[dict[str, Any]] = [{}] if always_raw else [{}, {"group_of_one": "raw"}]
    for arguments in choices:
        estimator = cls(whiten=False, **arguments)
        meaning = "without a baseline" if arguments or always_raw else "so their advantage is 0"
        with pytest.warns(UserWarning, match=f"{cls.__name__}: 1 of 1 groups .*{meaning}"):
            advantages, returns = built.read(estimator.estimate(built.rollout)[0]), [[1.0, 1.0, 1.0]]
        assert advantages == (returns if arguments or always_raw else [[0.0, 0.0, 0.0]])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            estimator.estimate(built.rollout)


@of_group_estimators
def test_rows_of_one_episode_in_two_groups_are_refused(cls: type[AdvantageEstimator]):
    (episode,) = [e for e in drawn(cls, 5) if len(e.reached) > 1][:1]
    rollout = build([episode], one_row=False).rollout
    with pytest.raises(ValueError, match="rows of one episode differ in their group"):
        cls().estimate(rollout.union(groups=torch.arange(len(rollout))))
