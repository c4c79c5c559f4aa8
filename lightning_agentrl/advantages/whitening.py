"""Whitening over the action tokens of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.advantages.layout import result_dtype
from lightning_agentrl.types.ranks import Reduce


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
