"""The one compress/scatter helper: action tokens of whole trajectories side by side, and back.

B rows, T columns (any tokens), N trajectories, L action tokens of the longest trajectory. A trajectory may be one row
with several turns or several rows with one turn each; the compressed form is the same, so estimators see no layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the action tokens of each trajectory are, in the order in which they were sampled; see :func:`compress`."""

    mask_BT: Tensor
    source_NL: Tensor  # index into the flattened [B*T], 0 where ``mask_NL`` is False
    mask_NL: Tensor  # left-aligned
    last_row_N: Tensor  # the row that holds the last action token of the trajectory

    def gather(self, x_BT: Tensor) -> Tensor:
        """[N, L], 0 off the mask whatever stands there in ``x_BT``."""
        if x_BT.shape != self.mask_BT.shape:
            raise ValueError(f"expected the shape of the mask, {list(self.mask_BT.shape)}, got {list(x_BT.shape)}")
        return torch.where(self.mask_NL, x_BT.flatten()[self.source_NL], 0)

    def scatter(self, x_NL: Tensor) -> Tensor:
        """[B, T], exactly 0 off the action mask."""
        out = x_NL.new_zeros(self.mask_BT.numel())
        out[self.source_NL[self.mask_NL]] = x_NL[self.mask_NL]
        return out.view(self.mask_BT.shape)


def compress(mask_BT: Tensor, turn_ids_BT: Tensor, trajectory_B: Tensor) -> Layout:
    """Index of the action tokens by trajectory; its rows follow each other by the turn of their first action token.

    Rows without action tokens take no part. Numbers off the mask are not read.

    Args:
        mask_BT: action mask, bool or 0/1.
        turn_ids_BT: number of the turn of each action token, not falling along a row.
        trajectory_B: label; rows with the same label are one trajectory.

    Raises:
        ValueError: shapes do not fit, or the order of a trajectory's tokens is not told by their turns (a turn in two
            rows, or turn ids that fall), which would make results depend on the order of rows.
    """
    mask = mask_BT.bool()
    if mask.dim() != 2 or turn_ids_BT.shape != mask.shape or trajectory_B.shape != mask.shape[:1]:
        raise ValueError(
            f"expected mask and turn ids [B, T] and trajectory labels [B], got {list(mask.shape)}, "
            f"{list(turn_ids_BT.shape)} and {list(trajectory_B.shape)}"
        )
    row_M, column_M = mask.nonzero(as_tuple=True)
    if not len(row_M):
        empty = torch.zeros(0, 0, dtype=torch.int64, device=mask.device)
        return Layout(mask, empty, empty.bool(), empty.flatten())

    # Rank the rows by (trajectory, first turn), least important key first; tokens of a row are in order already.
    first_turn_B = turn_ids_BT.gather(1, mask.int().argmax(1, keepdim=True)).squeeze(1)
    rows = torch.argsort(first_turn_B, stable=True)
    rows = rows[torch.argsort(trajectory_B[rows], stable=True)]
    rank_B = torch.empty_like(rows)
    rank_B[rows] = torch.arange(len(rows), device=mask.device)
    order = torch.argsort(rank_B[row_M], stable=True)
    row_M, column_M = row_M[order], column_M[order]

    label_M, turn_M = trajectory_B[row_M], turn_ids_BT[row_M, column_M]
    rise_M, row_starts_M = turn_M[1:] - turn_M[:-1], row_M[1:] != row_M[:-1]
    unordered = (label_M[1:] == label_M[:-1]) & ((rise_M < 0) | (row_starts_M & (rise_M == 0)))
    if unordered.any():
        raise ValueError(
            f"turns of trajectory {int(label_M[1:][unordered][0])} have no clear order: a turn must lie in one row, "
            "and turn ids must not fall along a trajectory"
        )

    _, counts_N = label_M.unique_consecutive(return_counts=True)
    ends_N = counts_N.cumsum(0)
    place_L = torch.arange(int(counts_N.max()), device=mask.device)
    mask_NL = place_L < counts_N[:, None]
    token_NL = torch.where(mask_NL, (ends_N - counts_N)[:, None] + place_L, 0)
    source_M = row_M * mask.shape[1] + column_M
    return Layout(mask, torch.where(mask_NL, source_M[token_NL], 0), mask_NL, row_M[ends_N - 1])
