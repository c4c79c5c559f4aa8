"""The action tokens of each episode side by side, and statistics over those of all ranks.

B rows, T columns (any tokens), N episodes, L action tokens of the longest episode. An episode may be one row
with several turns or several rows with one turn each; the compressed form is the same, so estimators do not see how
episodes were laid out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import attrgetter

import torch
from torch import Tensor

from lightning_agentrl.types.rollout import Reduce

FLAT = 1e-5  # of float32 returns in sums over thousands of tokens, relative to values and returns


@dataclass(frozen=True)
class Layout:
    """The positions of each episode's action tokens, in the order in which they were sampled; see :func:`compress`."""

    mask_BT: Tensor
    source_NL: Tensor  # index into the flattened [B*T], 0 where ``mask_NL`` is False
    mask_NL: Tensor  # left-aligned
    last_row_N: Tensor  # the row that holds the last action token of the episode

    def gather(self, x_BT: Tensor) -> Tensor:
        """Return [N, L] of [B, T], 0 off the mask whatever ``x_BT`` holds there."""
        if x_BT.shape != self.mask_BT.shape:
            raise ValueError(f"expected the shape of the mask, {list(self.mask_BT.shape)}, got {list(x_BT.shape)}")
        return torch.where(self.mask_NL, x_BT.flatten()[self.source_NL], 0)

    def scatter(self, x_NL: Tensor) -> Tensor:
        """Return [B, T] of [N, L], exactly 0 off the action mask."""
        out = x_NL.new_zeros(self.mask_BT.numel())
        out[self.source_NL[self.mask_NL]] = x_NL[self.mask_NL]
        return out.view(self.mask_BT.shape)

    def spread(self, x_N: Tensor) -> Tensor:
        """Return [B, T] with the value of its episode at every action token, exactly 0 elsewhere."""
        return self.scatter(x_N[:, None].expand(self.mask_NL.shape))

    @property
    def rows_NL(self) -> Tensor:
        """The row of each action token, 0 off the mask."""
        return self.source_NL // max(self.mask_BT.shape[1], 1)

    def of_episode(self, name: str, x_B: Tensor) -> Tensor:
        """Return [N], the number that all rows of each episode share.

        Raises:
            ValueError: rows of one episode differ in it, or the shape is not [B].
        """
        if x_B.shape != self.mask_BT.shape[:1]:
            raise ValueError(f"expected {name} of shape {list(self.mask_BT.shape[:1])}, got {list(x_B.shape)}")
        x_N = x_B[self.last_row_N]
        if ((x_B[self.rows_NL] != x_N[:, None]) & self.mask_NL).any():
            raise ValueError(f"rows of one episode differ in their {name}; they must be the same")
        return x_N

    def turns(self, turn_ids_BT: Tensor) -> Turns:
        """Return the turns of each episode, by the turn ids that it was compressed with."""
        ids_NL, mask_NL = self.gather(turn_ids_BT), self.mask_NL
        has_next_NL = torch.zeros_like(mask_NL)
        has_next_NL[:, :-1] = mask_NL[:, 1:]
        ends_NL = mask_NL & (~has_next_NL | (ids_NL != ids_NL.roll(-1, 1)))
        before_NL = ends_NL.cumsum(1) - ends_NL.long()  # turns that ended before the token
        count_N = ends_NL.sum(1)
        place_J = torch.arange(int(count_N.max()) if len(count_N) else 0, device=mask_NL.device)
        return Turns(mask_NL, torch.where(mask_NL, before_NL, 0), ends_NL, place_J < count_N[:, None])


@dataclass(frozen=True)
class Turns:
    """The turns of each episode in order, at most J; turns without action tokens are left out."""

    mask_NL: Tensor
    index_NL: Tensor  # which turn of its episode a token belongs to, 0 off the mask
    ends_NL: Tensor  # bool, the last action token of its turn
    mask_NJ: Tensor  # left-aligned

    def sum(self, x_NL: Tensor) -> Tensor:
        """Return [N, J], the sums over the tokens of each turn."""
        return x_NL.new_zeros(self.mask_NJ.shape).scatter_add_(1, self.index_NL, torch.where(self.mask_NL, x_NL, 0))

    def at_starts(self, x_NL: Tensor) -> Tensor:
        """Return [N, J], the number at the first token of each turn."""
        starts_NL = self.mask_NL & (self.index_NL != self.index_NL.roll(1, 1))
        starts_NL[:, :1] = self.mask_NL[:, :1]
        return self.sum(torch.where(starts_NL, x_NL, 0))

    def at_ends(self, x_NL: Tensor) -> Tensor:
        """Return [N, J], the number at the last token of each turn."""
        return self.sum(torch.where(self.ends_NL, x_NL, 0))

    def spread(self, x_NJ: Tensor) -> Tensor:
        """Return [N, L] with the value of its turn at every token, 0 off the mask."""
        return torch.where(self.mask_NL, x_NJ.gather(1, self.index_NL), 0)


def compress(mask_BT: Tensor, turn_ids_BT: Tensor, episode_B: Tensor) -> Layout:
    """Index the action tokens by episode, with its rows in the order of the turns of their first action tokens.

    Rows without action tokens are left out. Numbers off the mask are not read.

    Args:
        mask_BT: action mask, bool or 0/1.
        turn_ids_BT: number of the turn of each action token, not falling along a row.
        episode_B: label; rows with the same label are one episode.

    Raises:
        ValueError: shapes do not fit, or turns do not determine the order of an episode's tokens (a turn in two rows,
            or turn ids that fall), which would make results depend on the order of rows.
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

    # Rank the rows by (episode, first turn), least important key first; tokens of a row are in order already.
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
            f"turns of episode {int(label_M[1:][unordered][0])} have no clear order: a turn must lie in one row, "
            "and turn ids must not fall along an episode"
        )

    _, counts_N = label_M.unique_consecutive(return_counts=True)
    ends_N = counts_N.cumsum(0)
    place_L = torch.arange(int(counts_N.max()), device=mask.device)
    mask_NL = place_L < counts_N[:, None]
    token_NL = torch.where(mask_NL, (ends_N - counts_N)[:, None] + place_L, 0)
    source_M = row_M * mask.shape[1] + column_M
    return Layout(mask, torch.where(mask_NL, source_M[token_NL], 0), mask_NL, row_M[ends_N - 1])


def result_dtype(*given: Tensor) -> torch.dtype:
    """Return the dtype of what is made of these tensors: float32 or better."""
    return reduce(torch.promote_types, map(attrgetter("dtype"), given), torch.float32)


def backward_sum(x_NK: Tensor, decay_NK: Tensor | float = 1.0) -> Tensor:
    """Return ``y_k = x_k + decay_k y_{k+1}`` from the last column to the first, with nothing carried into the last."""
    y_KN = x_NK.T.clone(memory_format=torch.contiguous_format)  # of one row, .contiguous() would be x itself
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
        x_BT: numbers of any floating dtype; statistics are taken in float64.
        mask_BT: action mask.
        reduce: sums a small float64 tensor over ranks; called twice on each rank, even on one without tokens. None:
            there is only one rank.

    Returns:
        [B, T] in float32 or better, 0 off the mask. With fewer than two tokens in total the numbers stay as they are.
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

    Deviations are taken from the global mean, in a second pass: sums of plain squares lose precision where the mean
    is large compared with the spread. ``x_MK`` is float64; ``reduce`` as in :func:`whiten`.
    """
    reduce = reduce or (lambda tensor: tensor)
    count, *totals = reduce(torch.cat([x_MK.new_tensor([len(x_MK)]), x_MK.sum(0)])).tolist()
    mean_K = x_MK.new_tensor(totals) / max(count, 1.0)
    return count, mean_K, reduce((x_MK - mean_K).square().sum(0)).to(x_MK.device)


@dataclass(frozen=True)
class ValueStatistics:
    """Statistics of values and returns over the action tokens of all ranks, with population standard deviations.

    ``explained_variance`` is ``1 - var(returns - values) / var(returns)``. 1: the critic predicts the returns up to a
    constant; 0: no better than a constant; below 0: worse. NaN if all returns are equal up to rounding, since there is
    nothing to explain. ``value_error`` is the root mean square of ``returns - values``, so a constant offset counts.
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
    """Measure how well values predict returns; all NaN without action tokens.

    Args:
        values_BT: values before the update.
        returns_BT: what they should have been.
        mask_BT: action mask.
        reduce: sums a small float64 tensor over ranks; called twice on each rank. None: there is only one rank.
    """
    mask = mask_BT.bool()
    values_M, returns_M = values_BT[mask].double(), returns_BT[mask].double()
    count, mean, squares = global_moments(torch.stack([values_M, returns_M, returns_M - values_M], 1), reduce)
    if not count:
        return ValueStatistics(*[math.nan] * 6)
    value_std, return_std, error_std = (squares / count).sqrt().tolist()
    # Returns are advantage plus value: equal ones differ by the rounding of the values, which may be far larger.
    flat = return_std <= FLAT * math.hypot(float(mean[0]), value_std, float(mean[1]))
    return ValueStatistics(
        value_mean=float(mean[0]),
        value_std=value_std,
        return_mean=float(mean[1]),
        return_std=return_std,
        value_error=math.hypot(error_std, float(mean[2])),
        explained_variance=math.nan if flat else 1.0 - float(squares[2] / squares[1]),
    )
