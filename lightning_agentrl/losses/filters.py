"""Group filters: select groups of episodes with a learning signal, by the spread of their scores.

Filters return the rows to keep; other rows count in no loss or denominator. Scores are outcomes, not shaped rewards.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import check_shapes, check_share, count_of
from lightning_agentrl.types.rollout import Gather, alone
from lightning_agentrl.types.rounding import all_equal


def group_scores(
    groups_B: Tensor, scores_B: Tensor, episode_B: Tensor | None = None, gather: Gather = alone
) -> dict[int, list[float]]:
    """Return the scores of each group over all ranks, one score per episode.

    Args:
        groups_B: group label of each row.
        scores_B: score of each row's episode.
        episode_B: episode label of each row; None: every row is an episode.
        gather: function that gathers a tensor from all ranks.

    Raises:
        ValueError: shapes differ.
    """
    check_shapes(groups=groups_B, scores=scores_B, **({} if episode_B is None else {"episode": episode_B}))
    groups, scores = (torch.cat([part.cpu() for part in gather(x)]).tolist() for x in (groups_B, scores_B.double()))
    if episode_B is None:
        episodes = list(range(len(groups)))
    else:
        episodes = torch.cat([part.cpu() for part in gather(episode_B)]).tolist()
    found: dict[int, dict[int, float]] = {}
    for group, episode, score in zip(groups, episodes, scores, strict=True):
        found.setdefault(group, {})[episode] = score
    return {group: list(scores.values()) for group, scores in found.items()}


def spread_of(scores: list[float]) -> float:
    """Return the standard deviation (n - 1) of the scores of a group, exactly 0 for equal scores or a single score.

    Scores that differ only by rounding count as equal, as in estimators.
    """
    return 0.0 if all_equal(scores) else statistics.stdev(scores)


def varied_groups(scores: Mapping[int, list[float]]) -> set[int]:
    """Return the groups whose scores are not all equal."""
    return {group for group, of_group in scores.items() if not all_equal(of_group)}


def widest_groups(scores: Mapping[int, list[float]], share: float) -> set[int]:
    """Return the ``max(1, floor(share * G))`` of G groups with the widest spread; smaller labels win ties."""
    return set(_by_spread(scores)[: count_of(share, len(scores))])


def covering_groups(scores: Mapping[int, list[float]], share: float, of: Literal["std", "variance"]) -> set[int]:
    """Return the smallest set of groups whose spreads, measured by ``of``, add up to a fraction ``share`` of the total.

    The set is empty if every group has equal scores.
    """
    order, sums, total = _by_spread(scores), [], 0.0
    for group in order:
        total += spread_of(scores[group]) ** (2 if of == "variance" else 1)
        sums.append(total)
    if total == 0:
        return set()
    return set(order[: 1 + next(k for k, covered in enumerate(sums) if covered >= share * total)])


def _by_spread(scores: Mapping[int, list[float]]) -> list[int]:
    return sorted(scores, key=lambda group: (-spread_of(scores[group]), group))


class GroupFilter(ABC):
    """Base class of group filters, which choose the rows to keep by the scores of their groups."""

    def __call__(
        self, groups_B: Tensor, scores_B: Tensor, episode_B: Tensor | None = None, gather: Gather = alone
    ) -> Tensor:
        """Return a mask [B] of the rows to keep; arguments are as in :func:`group_scores`."""
        kept = sorted(self.keep(group_scores(groups_B, scores_B, episode_B, gather)))
        return torch.isin(groups_B, groups_B.new_tensor(kept))

    @abstractmethod
    def keep(self, scores: Mapping[int, list[float]]) -> set[int]:
        """Return the labels of the groups to keep, given the scores of each group."""


class DropEqualScores(GroupFilter):
    """Filter that drops groups with equal scores, including single episodes, since such groups have no advantage."""

    def keep(self, scores: Mapping[int, list[float]]) -> set[int]:
        return varied_groups(scores)


class KeepWidest(GroupFilter):
    """Filter that keeps the groups with the widest spread of scores (StarPO-S, arXiv 2504.20073).

    Args:
        share: fraction of the groups to keep; at least one is kept.
    """

    def __init__(self, share: float = 0.25) -> None:
        check_share("KeepWidest", share)
        self.share = share

    def keep(self, scores: Mapping[int, list[float]]) -> set[int]:
        return widest_groups(scores, self.share)


class KeepCovering(GroupFilter):
    """Filter that keeps the smallest set of groups whose spreads add up to a fraction of the total (arXiv 2604.06268).

    Args:
        share: fraction of the total spread to keep.
        of: measure of spread that is summed: the standard deviation (``std``) or ``variance`` of each group.
    """

    def __init__(self, share: float = 0.9, of: Literal["std", "variance"] = "std") -> None:
        check_share("KeepCovering", share)
        if of not in ("std", "variance"):
            raise ValueError(f"KeepCovering: of must be std or variance, got '{of}'")
        self.share = share
        self.of: Literal["std", "variance"] = of

    def keep(self, scores: Mapping[int, list[float]]) -> set[int]:
        return covering_groups(scores, self.share, self.of)
