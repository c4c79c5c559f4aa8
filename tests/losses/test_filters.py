from __future__ import annotations

import pytest
import torch

from lightning_agentrl.advantages import Groups, standardised
from lightning_agentrl.losses import DropEqualScores, GroupFilter, KeepCovering, KeepWidest, group_scores, spread_of
from tests.losses.ranks import on_ranks

# Groups: 5 has std 1 (0, 2, 1), 3 has std 3 (0, 6, 3), 9 has none, 2**40 has std 2 (1, 5, 3); rows in any order
GROUPS = torch.tensor([5, 3, 9, 5, 2**40, 3, 9, 5, 2**40, 3, 2**40])
SCORES = torch.tensor([0.0, 0.0, 7.0, 2.0, 1.0, 6.0, 7.0, 1.0, 5.0, 3.0, 3.0])
FILTERS = [DropEqualScores(), KeepWidest(0.5), KeepWidest(0.01), KeepCovering(0.8), KeepCovering(0.6, "variance")]


def kept(group_filter: GroupFilter, *args: torch.Tensor) -> set[int]:
    mask = group_filter(*(args or (GROUPS, SCORES)))
    assert mask.dtype == torch.bool
    return set(GROUPS[mask].tolist())


@pytest.mark.parametrize(
    ("group_filter", "want"),
    [
        (DropEqualScores(), {5, 3, 2**40}),
        (KeepWidest(0.5), {3, 2**40}),  # 2 of 4 groups
        (KeepWidest(0.7), {3, 2**40}),  # floor(2.8)
        (KeepWidest(0.01), {3}),  # one at least
        (KeepWidest(1.0), {5, 3, 9, 2**40}),
        (KeepCovering(0.5), {3}),  # 3 of 6
        (KeepCovering(0.51), {3, 2**40}),
        (KeepCovering(5 / 6), {3, 2**40}),
        (KeepCovering(1.0), {5, 3, 2**40}),  # nothing is gained by a group of equal scores
        (KeepCovering(9 / 14, "variance"), {3}),  # 9 of 9 + 4 + 1
        (KeepCovering(0.65, "variance"), {3, 2**40}),
    ],
)
def test_groups_by_hand(group_filter, want):
    assert kept(group_filter) == want


def test_rows_of_a_episode_count_once():
    """With the scores 0, 0, 0, 1 the second group would look narrower than the first."""
    groups = torch.tensor([1, 1, 2, 2, 2, 2])
    scores = torch.tensor([0.0, 0.9, 0.0, 0.0, 0.0, 1.0])
    episode = torch.tensor([10, 11, 20, 20, 20, 21])
    assert KeepWidest(0.5)(groups, scores).tolist() == [True] * 2 + [False] * 4
    assert KeepWidest(0.5)(groups, scores, episode).tolist() == [False] * 2 + [True] * 4
    assert group_scores(groups, scores, episode) == {1: [0.0, pytest.approx(0.9)], 2: [0.0, 1.0]}


def test_single_episodes_and_equal_scores_teach_nothing():
    assert spread_of([3.0]) == 0.0
    assert spread_of([0.1, 0.1, 0.1]) == 0.0
    groups, scores = torch.tensor([1, 2, 2]), torch.tensor([5.0, 0.1, 0.1])
    assert not DropEqualScores()(groups, scores).any()
    assert not KeepCovering(0.9)(groups, scores).any()
    assert KeepWidest(0.5)(groups, scores).tolist() == [True, False, False]  # of equal spread, the smaller label


@pytest.mark.parametrize("group_filter", FILTERS, ids=lambda f: type(f).__name__)
def test_the_order_of_rows_does_not_matter(group_filter):
    order = torch.randperm(len(GROUPS), generator=torch.Generator().manual_seed(1))
    want = group_filter(GROUPS, SCORES)[order]
    assert torch.equal(group_filter(GROUPS[order], SCORES[order]), want)


@pytest.mark.parametrize("group_filter", FILTERS, ids=lambda f: type(f).__name__)
@pytest.mark.parametrize("cut", [0, 4])
def test_groups_may_be_spread_over_ranks(group_filter, cut):
    parts = [slice(0, cut), slice(cut, None)]
    episode = torch.arange(len(GROUPS))
    got = on_ranks(
        lambda rank, gather: group_filter(GROUPS[parts[rank]], SCORES[parts[rank]], episode[parts[rank]], gather)
    )
    assert torch.equal(torch.cat(got), group_filter(GROUPS, SCORES))


@pytest.mark.parametrize("group_filter", FILTERS, ids=lambda f: type(f).__name__)
def test_no_rows(group_filter):
    assert group_filter(torch.zeros(0, dtype=torch.int64), torch.zeros(0)).shape == (0,)


def test_wrong_settings_are_refused():
    for cls in (KeepWidest, KeepCovering):
        for share in (0.0, 1.1, float("nan")):
            with pytest.raises(ValueError, match=f"{cls.__name__}.*0.*1"):
                cls(share)
    with pytest.raises(ValueError, match="'range'"):
        KeepCovering(0.5, "range")
    with pytest.raises(ValueError, match=r"groups \[11\], scores \[2\]"):
        DropEqualScores()(GROUPS, SCORES[:2])


def test_scores_that_differ_by_rounding_are_equal():
    """As to estimators: such a group has no advantage."""
    scores = torch.tensor([0.59999999, 0.60000002, 0.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([1, 1, 2, 2])
    assert standardised(scores, Groups(groups))[:2].tolist() == [0.0, 0.0]
    assert DropEqualScores()(groups, scores).tolist() == [False, False, True, True]
    assert spread_of(scores[:2].tolist()) == 0.0


@pytest.mark.parametrize("percent", range(1, 101))
def test_a_share_of_a_hundred_groups_is_that_many(percent):
    groups = torch.arange(100).repeat_interleave(2)
    scores = torch.arange(200.0) ** 2
    assert KeepWidest(percent / 100)(groups, scores).sum() == 2 * percent
