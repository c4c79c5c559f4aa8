"""Attention over a prefix tree by FlashAttention: a call for all branches, and one for each level above others.

Kernels for rows of different lengths read what lies one after the other, and that is what a tree is: its branches are
rows that see themselves causally, and each branch is seen, whole, by the tokens below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.models.integers import integers

MOST_LEVELS = 4  # a call of its own for each; beyond, FlexAttention takes the processor less time
ROW_BLOCK = 128  # queries up to which the backward pass fills each row
MOST_QUERIES = 2**16  # of a call, filled; a head of 128 takes 32 MiB of them there

Places = slice | Tensor  # of tokens in the layout; int64 where they lie apart


@dataclass(frozen=True, slots=True)
class Level:
    """S rows of queries and of the keys that each of them sees, in the order of the layout."""

    queries: Places
    keys: Places
    query_bounds: Tensor  # [S + 1] int32, where the rows of queries begin and the last one ends
    key_bounds: Tensor  # [S + 1] int32
    most_queries: int  # of a row
    most_keys: int
    causal: bool  # its rows are branches that see themselves; else they see all of their keys


@dataclass(frozen=True, slots=True)
class Span:
    """A branch of the tree: its tokens, and the end of those below it."""

    start: int
    stop: int
    end: int


def lay_levels(spans: Sequence[Span], device: torch.device) -> tuple[Level, ...] | None:
    """Return all branches of a tree as one level, then those that others lie below, level by level from the root.

    None, where there are too many levels, or so many rows that filling them up would take much memory.

    Args:
        spans: branches in depth-first order, each beginning where the last one stops.
        device: of the tensors.
    """
    above: list[int] = []  # ends of the branches that a branch lies in
    deep: list[list[Span]] = []
    for span in spans:
        while above and above[-1] <= span.start:
            above.pop()
        if span.end > span.stop:
            if len(above) == len(deep):
                deep.append([])
            deep[len(above)].append(span)
            above.append(span.end)
    if len(deep) > MOST_LEVELS or spans[-1].end + ROW_BLOCK * len(spans) > MOST_QUERIES:
        return None
    branches = _level([range(s.start, s.stop) for s in spans], [range(s.start, s.stop) for s in spans], True, device)
    return branches, *(
        _level([range(s.stop, s.end) for s in level], [range(s.start, s.stop) for s in level], False, device)
        for level in deep
    )


def _level(queries: list[range], keys: list[range], causal: bool, device: torch.device) -> Level:
    bounds = [
        integers([0, *accumulate(map(len, rows))], device).to(torch.int32)
        for rows in ((queries,) if causal else (queries, keys))
    ]
    most_queries, most_keys = (max(map(len, rows)) for rows in (queries, keys))
    places = _places(queries, device), _places(keys, device)
    return Level(*places, bounds[0], bounds[-1], most_queries, most_keys, causal)


def _places(rows: list[range], device: torch.device) -> Places:
    first, last = rows[0].start, rows[-1].stop
    if sum(map(len, rows)) == last - first:
        return slice(first, last)
    return integers(list(chain.from_iterable(rows)), device)


def fits_levels(query: Tensor) -> bool:
    """Return whether FlashAttention's kernels, as torch brings them, take the query of a GPU.

    For gradients of heads of 200 to 224 GPUs of workstations have too little memory in a block of threads.
    """
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    fits = width % 8 == 0 and (width <= 192 or 224 < width <= 256)
    return half and fits and _has_flash_attention(query.device)


@cache
def _has_flash_attention(device: torch.device) -> bool:
    available = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability(device) >= (8, 0)


def flash_rows(q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, level: Level, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention [Q, H, D] and log-sum-exps [H, Q] float32 of the rows of a level."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(q_QHD, k_KGD, v_KGD, level.query_bounds, level.key_bounds, level.most_queries, level.most_keys),
        *(0.0, level.causal, False),
        scale=scale,
    )
    return out, lse


def flash_rows_backward(
    grad_QHD: Tensor,
    q_QHD: Tensor,
    k_KGD: Tensor,
    v_KGD: Tensor,
    out_QHD: Tensor,
    lse_HQ: Tensor,
    level: Level,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values, given output and log-sum-exps, which may be merged ones."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q_QHD.device)
    grads = torch.ops.aten._flash_attention_backward(
        # the kernel takes log-sum-exps as they lie in memory
        *(grad_QHD, q_QHD, k_KGD, v_KGD, out_QHD, lse_HQ.contiguous(), level.query_bounds, level.key_bounds),
        *(level.most_queries, level.most_keys, 0.0, level.causal, no_dropout, no_dropout),
        scale=scale,
    )
    return tuple(grads)


class LevelledAttention(torch.autograd.Function):
    """Attention [N, H, D] of queries [N, H, D] to keys and values [N, G, D], a call for each level.

    Calls are merged by their log-sum-exps. In the backward pass each takes the merged output and log-sum-exps, so that
    the gradients of the calls add up exactly, as in :class:`BranchedAttention`.
    """

    @staticmethod
    def forward(
        ctx: Any, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, levels: tuple[Level, ...], scale: float
    ) -> Tensor:
        branches, *further = levels
        out, lse = flash_rows(q_NHD, k_NGD, v_NGD, branches, scale)
        if further:
            merged = out.to(torch.promote_types(out.dtype, torch.float32))
            for level in further:
                part, part_lse = flash_rows(q_NHD[level.queries], k_NGD[level.keys], v_NGD[level.keys], level, scale)
                total = torch.logaddexp(lse[:, level.queries], part_lse)
                weight = (part_lse - total).exp_().T[..., None]
                merged[level.queries] = torch.lerp(merged[level.queries], part.to(merged.dtype), weight)
                lse[:, level.queries] = total
            out = merged.to(out.dtype)
        ctx.save_for_backward(q_NHD, k_NGD, v_NGD, out, lse)
        ctx.levels, ctx.scale = levels, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        branches, *further = ctx.levels
        grad = grads[0].contiguous()
        dq, dk, dv = flash_rows_backward(grad, q, k, v, out, lse, branches, ctx.scale)
        for level in further:
            queries, keys = level.queries, level.keys
            parts = flash_rows_backward(
                *(grad[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries]), level, ctx.scale
            )
            for whole, part, places in zip((dq, dk, dv), parts, (queries, keys, keys), strict=True):
                whole[places] += part
        return dq, dk, dv, None, None
