"""A layout with the action tokens of each episode side by side, and statistics over action tokens of all ranks.

Suffixes: B rows, T columns (any tokens), N episodes, L action tokens of the longest episode. An episode may be one row
with several turns or several rows with one turn each. The layout is the same in both cases, so estimators do not depend
on the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter

import torch
from torch import Tensor

from lightning_agentrl.types.rollout import Reduce

FLAT = 1e-5  # largest relative rounding error of float32 returns that are sums over thousands of tokens


@dataclass(frozen=True)
class Layout:
    """Indices of each episode's action tokens, in the order of sampling; see :func:`compress`."""

    mask_BT: Tensor
    source_NL: Tensor  # index into a flattened [B, T] tensor, 0 off ``mask_NL``
    mask_NL: Tensor  # True on action tokens, left-aligned
    last_row_N: Tensor  # row of the last action token of each episode

    def gather(self, x_BT: Tensor) -> Tensor:
        """Convert [B, T] to [N, L], 0 off the mask; values of ``x_BT`` off the action mask are ignored."""
        if x_BT.shape != self.mask_BT.shape:
            raise ValueError(f"expected the shape of the mask, {list(self.mask_BT.shape)}, got {list(x_BT.shape)}")
        return torch.where(self.mask_NL, x_BT.flatten()[self.source_NL], 0)

    def scatter(self, x_NL: Tensor) -> Tensor:
        """Convert [N, L] to [B, T], exactly 0 off the action mask."""
        out = x_NL.new_zeros(self.mask_BT.numel())
        out[self.source_NL[self.mask_NL]] = x_NL[self.mask_NL]
        return out.view(self.mask_BT.shape)

    def spread(self, x_N: Tensor) -> Tensor:
        """Expand values of episodes [N] to their action tokens [B, T], exactly 0 off the action mask."""
        return self.scatter(x_N[:, None].expand(self.mask_NL.shape))

    @property
    def rows_NL(self) -> Tensor:
        """Row of each action token, 0 off the mask."""
        return self.source_NL // max(self.mask_BT.shape[1], 1)

    def of_episode(self, name: str, x_B: Tensor) -> Tensor:
        """Convert values of rows [B] to values of episodes [N]; all rows of an episode must have the same value.

        Args:
            name: name of the values, for the error message.
            x_B: value of each row.

        Raises:
            ValueError: rows of one episode differ, or the shape is not [B].
        """
        if x_B.shape != self.mask_BT.shape[:1]:
            raise ValueError(f"expected {name} of shape {list(self.mask_BT.shape[:1])}, got {list(x_B.shape)}")
        x_N = x_B[self.last_row_N]
        if ((x_B[self.rows_NL] != x_N[:, None]) & self.mask_NL).any():
            raise ValueError(f"rows of one episode differ in their {name}; they must be the same")
        return x_N

    def turns(self, turn_ids_BT: Tensor) -> Turns:
        """Return the turns of each episode, given the turn ids that were passed to :func:`compress`."""
        ids_NL, mask_NL = self.gather(turn_ids_BT), self.mask_NL
        has_next_NL = torch.zeros_like(mask_NL)
        has_next_NL[:, :-1] = mask_NL[:, 1:]
        ends_NL = mask_NL & (~has_next_NL | (ids_NL != ids_NL.roll(-1, 1)))
        before_NL = ends_NL.cumsum(1) - ends_NL.long()  # number of turns that ended before each token
        count_N = ends_NL.sum(1)
        place_J = torch.arange(int(count_N.max()) if len(count_N) else 0, device=mask_NL.device)
        return Turns(mask_NL, torch.where(mask_NL, before_NL, 0), ends_NL, place_J < count_N[:, None])


@dataclass(frozen=True)
class Turns:
    """The turns of each episode in order, at most J of them; turns without action tokens are omitted."""

    mask_NL: Tensor  # True on action tokens
    index_NL: Tensor  # index of each token's turn in its episode, 0 off the mask
    ends_NL: Tensor  # True at the last action token of each turn
    mask_NJ: Tensor  # True for turns that exist, left-aligned

    def sum(self, x_NL: Tensor) -> Tensor:
        """Return sums [N, J] over the tokens of each turn."""
        return x_NL.new_zeros(self.mask_NJ.shape).scatter_add_(1, self.index_NL, torch.where(self.mask_NL, x_NL, 0))

    def at_starts(self, x_NL: Tensor) -> Tensor:
        """Return values [N, J] at the first token of each turn."""
        starts_NL = self.mask_NL & (self.index_NL != self.index_NL.roll(1, 1))
        starts_NL[:, :1] = self.mask_NL[:, :1]
        return self.sum(torch.where(starts_NL, x_NL, 0))

    def at_ends(self, x_NL: Tensor) -> Tensor:
        """Return values [N, J] at the last token of each turn."""
        return self.sum(torch.where(self.ends_NL, x_NL, 0))

    def spread(self, x_NJ: Tensor) -> Tensor:
        """Expand values of turns [N, J] to their tokens [N, L], 0 off the mask."""
        return torch.where(self.mask_NL, x_NJ.gather(1, self.index_NL), 0)


def compress(mask_BT: Tensor, turn_ids_BT: Tensor, episode_B: Tensor) -> Layout:
    """Index the action tokens by episode; the rows of an episode are ordered by the turns of their first action tokens.

    Rows without action tokens are omitted. Values off the mask are ignored.

    Args:
        mask_BT: action mask, bool or 0/1.
        turn_ids_BT: id of each action token's turn, non-decreasing along a row.
        episode_B: episode label of each row; rows with equal labels are one episode.

    Raises:
        ValueError: shapes do not fit, or turn ids do not determine the order of an episode's tokens, since a turn is in
            two rows or turn ids decrease. With such rows, results would depend on the order of rows.
    """
    mask = mask_BT.bool()
    if mask.dim() != 2 or turn_ids_BT.shape != mask.shape or episode_B.shape != mask.shape[:1]:
        raise ValueError(
            f"expected mask and turn ids [B, T] and episode labels [B], got {list(mask.shape)}, "
            f"{list(turn_ids_BT.shape)} and {list(episode_B.shape)}"
        )
    row_M, column_M = mask.nonzero(as_tuple=True)
    if not len(row_M):
        empty = torch.zeros(0, 0, dtype=torch.int64, device=mask.device)
        return Layout(mask, empty, empty.bool(), empty.flatten())

    # Sort the rows by (episode, first turn), least significant key first; tokens within a row are in order already.
    first_turn_B = turn_ids_BT.gather(1, mask.int().argmax(1, keepdim=True)).squeeze(1)
    rows = torch.argsort(first_turn_B, stable=True)
    rows = rows[torch.argsort(episode_B[rows], stable=True)]
    rank_B = torch.empty_like(rows)
    rank_B[rows] = torch.arange(len(rows), device=mask.device)
    order = torch.argsort(rank_B[row_M], stable=True)
    row_M, column_M = row_M[order], column_M[order]

    label_M, turn_M = episode_B[row_M], turn_ids_BT[row_M, column_M]
    rise_M, row_starts_M = turn_M[1:] - turn_M[:-1], row_M[1:] != row_M[:-1]
    unordered = (label_M[1:] == label_M[:-1]) & ((rise_M < 0) | (row_starts_M & (rise_M == 0)))
    if unordered.any():
        raise ValueError(
            f"turns of episode {int(label_M[1:][unordered][0])} have no clear order: a turn must be in one row, "
            "and turn ids must not decrease along an episode"
        )

    _, counts_N = label_M.unique_consecutive(return_counts=True)
    ends_N = counts_N.cumsum(0)
    place_L = torch.arange(int(counts_N.max()), device=mask.device)
    mask_NL = place_L < counts_N[:, None]
    token_NL = torch.where(mask_NL, (ends_N - counts_N)[:, None] + place_L, 0)
    source_M = row_M * mask.shape[1] + column_M
    return Layout(mask, torch.where(mask_NL, source_M[token_NL], 0), mask_NL, row_M[ends_N - 1])


def result_dtype(*given: Tensor) -> torch.dtype:
    """Return the dtype of results that are computed from these tensors: float32 or better."""
    return reduce(torch.promote_types, map(attrgetter("dtype"), given), torch.float32)


def backward_sum(x_NK: Tensor, decay_NK: Tensor | float = 1.0) -> Tensor:
    """Return ``y_k = x_k + decay_k y_{k+1}``, computed from the last column, where y = x, to the first."""
    y_KN = x_NK.T.clone(memory_format=torch.contiguous_format)  # with one row, .contiguous() would return x itself
    decay_KN = torch.as_tensor(decay_NK, dtype=x_NK.dtype, device=x_NK.device).expand(x_NK.shape).T.contiguous()
    for k in reversed(range(len(y_KN) - 1)):
        y_KN[k].addcmul_(decay_KN[k], y_KN[k + 1])
    return y_KN.T


def kl_in_reward(rewards_BT: Tensor, kl_BT: Tensor, mask_BT: Tensor, beta: float) -> Tensor:
    """Return ``r - beta * kl`` on action tokens.

    Args:
        rewards_BT: reward of each token.
        kl_BT: KL to the reference at each token, in nats (see ``kl_estimate``).
        mask_BT: action mask.
        beta: reward per nat.

    Returns:
        [B, T] in float32 or better, 0 off the mask, without gradient.
    """
    dtype = result_dtype(rewards_BT, kl_BT)
    return torch.where(mask_BT.bool(), rewards_BT.detach().to(dtype) - beta * kl_BT.detach().to(dtype), 0)


@torch.no_grad()
def whiten(x_BT: Tensor, mask_BT: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return ``(x - mean) / sqrt(var + 1e-8)`` over the action tokens of all ranks, with the unbiased variance.

    Args:
        x_BT: numbers of any floating dtype; statistics are computed in float64.
        mask_BT: action mask.
        reduce: function that sums a small float64 tensor over ranks; called twice on each rank, even on ranks without
            tokens. None means that there is only one rank.

    Returns:
        [B, T] in float32 or better, 0 off the mask. With fewer than two tokens in total, numbers are not changed.
    """
    mask = mask_BT.bool()
    dtype = result_dtype(x_BT)
    out_BT = torch.zeros_like(x_BT, dtype=dtype)
    x_M = x_BT[mask].double()
    count, mean, squares = global_moments(x_M[:, None], reduce)
    if count >= 2:
        x_M = (x_M - mean) / (squares / (count - 1) + 1e-8).sqrt()
    out_BT[mask] = x_M.to(dtype)
    return out_BT


def global_moments(x_MK: Tensor, reduce: Reduce | None = None) -> tuple[float, Tensor, Tensor]:
    """Return count, mean [K] and sum of squared deviations [K] of K columns over the M rows of all ranks.

    Deviations from the global mean are computed in a second pass, since sums of squares lose precision if the mean is
    large compared with the spread.

    Args:
        x_MK: numbers in float64.
        reduce: function that sums a small float64 tensor over ranks; called twice. None means that there is only one
            rank.
    """
    reduce = reduce or (lambda tensor: tensor)
    count, *totals = reduce(torch.cat([x_MK.new_tensor([len(x_MK)]), x_MK.sum(0)])).tolist()
    mean_K = x_MK.new_tensor(totals) / max(count, 1.0)
    return count, mean_K, reduce((x_MK - mean_K).square().sum(0)).to(x_MK.device)


@dataclass(frozen=True)
class ValueStatistics:
    """Statistics of values and returns over the action tokens of all ranks, with population standard deviations.

    ``explained_variance`` is ``1 - var(returns - values) / var(returns)``. At 1, the critic predicts the returns up to
    a constant; at 0, the critic is no better than a constant; below 0, it is worse. The explained variance is NaN if
    all returns are equal up to rounding. ``value_error`` is the root mean square of ``returns - values``, so it
    includes a constant offset.
    """

    value_mean: float
    value_std: float
    return_mean: float
    return_std: float
    value_error: float
    explained_variance: float


@torch.no_grad()
def value_statistics(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, reduce: Reduce | None = None
) -> ValueStatistics:
    """Measure how well values predict returns; all results are NaN without action tokens.

    Args:
        values_BT: values before the update.
        returns_BT: returns, the targets of the values.
        mask_BT: action mask.
        reduce: function that sums a small float64 tensor over ranks; called twice on each rank. None means that there
            is only one rank.
    """
    mask = mask_BT.bool()
    values_M, returns_M = values_BT[mask].double(), returns_BT[mask].double()
    count, mean, squares = global_moments(torch.stack([values_M, returns_M, returns_M - values_M], 1), reduce)
    if not count:
        return ValueStatistics(*[math.nan] * 6)
    value_std, return_std, error_std = (squares / count).sqrt().tolist()
    # Returns are advantages plus values, so equal returns can differ by the rounding error of larger values.
    flat = return_std <= FLAT * math.hypot(float(mean[0]), value_std, float(mean[1]))
    return ValueStatistics(
        value_mean=float(mean[0]),
        value_std=value_std,
        return_mean=float(mean[1]),
        return_std=return_std,
        value_error=math.hypot(error_std, float(mean[2])),
        explained_variance=math.nan if flat else 1.0 - float(squares[2] / squares[1]),
    )
