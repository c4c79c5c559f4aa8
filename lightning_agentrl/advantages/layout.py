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
    """Where the action tokens of each trajectory are, in the order in which they were sampled."""

    mask_BT: Tensor
    source_NL: Tensor  # index into the flattened [B*T], 0 where ``mask_NL`` is False
    mask_NL: Tensor
    last_row_N: Tensor  # the row that holds the last action token of the trajectory

    def gather(self, x_BT: Tensor) -> Tensor:
        """[N, L], 0 off the mask whatever stands there in ``x_BT``."""
        return torch.where(self.mask_NL, x_BT.flatten()[self.source_NL], 0)

    def scatter(self, x_NL: Tensor) -> Tensor:
        """[B, T], exactly 0 off the action mask."""
        out = x_NL.new_zeros(self.mask_BT.numel())
        out[self.source_NL[self.mask_NL]] = x_NL[self.mask_NL]
        return out.view(self.mask_BT.shape)


def compress(mask_BT: Tensor, turn_ids_BT: Tensor, trajectory_B: Tensor) -> Layout:
    """Index of the action tokens by trajectory; rows of one trajectory in the order of their turns.

    Rows without action tokens take no part.
    """
    mask = mask_BT.bool()
    rows, columns = mask.nonzero(as_tuple=True)
    if not len(rows):
        empty = torch.zeros(0, 0, dtype=torch.int64, device=mask.device)
        return Layout(mask, empty, empty.bool(), empty.flatten())
    # Sort tokens by trajectory, turn, column: three stable sorts, least important key first (they come by column).
    turn = turn_ids_BT[rows, columns]
    order = torch.argsort(turn, stable=True)
    order = order[torch.argsort(trajectory_B[rows[order]], stable=True)]
    rows, columns = rows[order], columns[order]
    _, counts = trajectory_B[rows].unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    place = torch.arange(int(counts.max()), device=mask.device)
    mask_NL = place < counts[:, None]
    token_NL = torch.where(mask_NL, (ends - counts)[:, None] + place, 0)
    source = rows * mask.shape[1] + columns
    return Layout(mask, source[token_NL], mask_NL, rows[ends - 1])
