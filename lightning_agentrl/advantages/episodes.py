"""Base classes of estimators that compare the episodes of a group. An episode counts once, however many rows it has."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_agentrl.advantages.base import AdvantageEstimator, token_rewards
from lightning_agentrl.advantages.layout import Layout, compress, result_dtype
from lightning_agentrl.types import Rollout, Turn
from lightning_agentrl.types.rollout import Reduce
from lightning_agentrl.types.rounding import HALF_STEP, ROUNDING


class Groups:
    """Statistics over groups of N members. Results have the shape of the input, [N] or [N, K]: one per member.

    Args:
        labels: labels [N] or [N, D]; members with equal labels are one group.
        rounding_N: largest rounding error of each member's number, which matters for sums in which larger numbers
            cancel; None means only a relative error of one in a million.
    """

    def __init__(self, labels: Tensor, rounding_N: Tensor | None = None) -> None:
        self.index_N = labels.unique(dim=0, return_inverse=True)[1] if len(labels) else labels.new_zeros(0).long()
        self.count = int(self.index_N.max()) + 1 if len(labels) else 0
        self.size_N = self.sum(torch.ones(len(labels), dtype=torch.float64, device=labels.device))
        self.rounding_N = torch.zeros_like(self.size_N) if rounding_N is None else rounding_N

    @property
    def single_N(self) -> Tensor:
        """Mask [N] of members that are alone in their group."""
        return self.size_N == 1

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.count, *x.shape[1:]).index_add_(0, self.index_N, x)[self.index_N]

    def mean(self, x_N: Tensor) -> Tensor:
        return self.sum(x_N) / self.size_N

    def std(self, x_N: Tensor) -> Tensor:
        """Return the sample standard deviation (n - 1), 0 for a group of one."""
        return (self.sum((x_N - self.mean(x_N)).square()) / (self.size_N - 1).clamp_min(1)).sqrt()

    def max(self, x_N: Tensor) -> Tensor:
        """Return the maximum of the finite numbers in each group, ``-inf`` for a group without finite numbers."""
        return x_N.new_full((self.count,), -torch.inf).scatter_reduce_(0, self.index_N, x_N, "amax")[self.index_N]

    def min(self, x_N: Tensor) -> Tensor:
        return -self.max(-x_N)

    def equal(self, x_N: Tensor) -> Tensor:
        """Return a mask [N] of members in groups with numbers that are equal up to rounding, or in groups of one."""
        rounding_N = torch.maximum(ROUNDING * self.max(x_N.abs()), 2 * self.max(self.rounding_N))
        return self.max(x_N) - self.min(x_N) <= rounding_N

    def others(self, x_N: Tensor) -> Tensor:
        """Return the mean of the other members, NaN for a group of one."""
        return (self.sum(x_N) - x_N) / (self.size_N - 1)


GroupOfOne = Literal["zero", "raw"]


@dataclass(frozen=True)
class Episodes:
    """The N episodes of a rollout that have action tokens, in float64."""

    layout: Layout
    rewards_NL: Tensor
    groups: Groups
    labels_N: Tensor  # group label of each episode
    trained_NL: Tensor  # bool, True for action tokens to train on, False for rejected tokens

    @property
    def scores_N(self) -> Tensor:
        """Sum of the rewards of each episode over all its rows."""
        return self.rewards_NL.sum(1)

    @property
    def rounding_N(self) -> Tensor:
        """Largest rounding error of each score; see :func:`rounding_of_sums`."""
        return rounding_of_sums(self.rewards_NL)


def group_episodes(rollout: Rollout) -> Episodes:
    """Return the episodes of a rollout with groups, except those whose tokens were all rejected.

    Raises:
        ValueError: rows of one episode differ in their group, or the episode's turns have no clear order.
    """
    assert rollout.groups is not None
    layout = compress(_of_trained_episodes(rollout), rollout.turn_ids, rollout.episode)
    labels_N = layout.of_episode("group", rollout.groups)
    trained_NL = layout.gather(rollout.trained_mask.double()) > 0
    rewards_NL = layout.gather(token_rewards(rollout).double())
    return Episodes(layout, rewards_NL, Groups(labels_N, rounding_of_sums(rewards_NL)), labels_N, trained_NL)


def rounding_of_sums(rewards_NL: Tensor) -> Tensor:
    """Return the largest rounding error [N] of sums of float32 rewards, including rewards that cancel each other."""
    return HALF_STEP * rewards_NL.abs().sum(1)


def _of_trained_episodes(rollout: Rollout) -> Tensor:
    """Return a mask [B, A] of all action tokens in episodes with at least one token to train on."""
    if rollout.loss_mask is None:
        return rollout.action_mask
    labels, index_B = rollout.episode.unique(return_inverse=True)
    trained_B = rollout.trained_mask.any(1)
    trained_N = torch.zeros(len(labels), dtype=torch.bool, device=trained_B.device)
    trained_N[index_B[trained_B]] = True
    return rollout.action_mask & trained_N[index_B][:, None]


def turns_of(rollout: Rollout, layout: Layout) -> list[list[Turn]]:
    """Return the turns of each episode that have action tokens, in order."""
    turns, ids_NL = layout.turns(rollout.turn_ids), layout.gather(rollout.turn_ids)
    rows, ids = turns.at_ends(layout.rows_NL).tolist(), turns.at_ends(ids_NL).tolist()
    by_index = [{turn.index: turn for turn in sample.turns} for sample in rollout.samples]
    return [
        [by_index[rows[n][j]][ids[n][j]] for j in range(count)] for n, count in enumerate(turns.mask_NJ.sum(1).tolist())
    ]


class GroupEstimator(AdvantageEstimator):
    """Base class of estimators that need groups. The first group with a single episode causes a warning.

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    needs_groups: ClassVar[bool] = True

    def __init__(self, whiten: bool = False, group_of_one: GroupOfOne = "zero") -> None:
        super().__init__(whiten)
        self.group_of_one = group_of_one
        self._warned = False

    def episodes(self, rollout: Rollout) -> Episodes:
        """Return the episodes to compare, and warn of groups with a single episode."""
        self.check(rollout)
        episodes = group_episodes(rollout)
        alone = int(episodes.groups.single_N.sum())
        if alone and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: {alone} of {episodes.groups.count} groups hold a single episode with action "
                f"tokens, {self._meaning_of_one()}",
                stacklevel=3,
            )
        return episodes

    def where_alone(self, groups: Groups, scores_N: Tensor, advantages_N: Tensor) -> Tensor:
        """Return the advantages [N], replaced by 0 or the score in groups of one, as ``group_of_one`` specifies."""
        alone_N = scores_N if self.group_of_one == "raw" else torch.zeros_like(scores_N)
        return torch.where(groups.single_N, alone_N, advantages_N)

    def _meaning_of_one(self) -> str:
        """Return the part of the warning that states the advantage of single episodes."""
        if self.group_of_one == "zero":
            return "so their advantage is 0 (model.init_args.advantage.init_args.group_of_one)"
        return "so their advantage is the score, without a baseline (model.init_args.advantage.init_args.group_of_one)"


class ScoreEstimator(GroupEstimator):
    """Base class of estimators with one advantage per episode, computed from the scores of its group.

    All action tokens of an episode have this advantage. Returns are the scores.

    Args:
        whiten: whether to scale advantages to mean 0 and variance 1 over all trained tokens of all ranks.
        group_of_one: advantage of an episode that is alone in its group: ``zero``, or ``raw`` for the episode's score.
    """

    @abstractmethod
    def compare(self, episodes: Episodes, reduce: Reduce | None) -> Tensor:
        """Return the advantages [N] of the episodes; the caller overwrites advantages in groups of one."""

    @torch.no_grad()
    def estimate(self, rollout: Rollout, reduce: Reduce | None = None) -> tuple[Tensor, Tensor]:
        episodes, dtype = self.episodes(rollout), result_dtype(token_rewards(rollout))
        scores_N, spread = episodes.scores_N, episodes.layout.spread
        advantages_N = self.where_alone(episodes.groups, scores_N, self.compare(episodes, reduce))
        return spread(advantages_N.to(dtype)), spread(scores_N.to(dtype))
