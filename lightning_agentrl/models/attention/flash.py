"""Attention over a prefix tree by flash kernels: tiles of neighboring tokens, and levels of the tree.

*Tiles* are for short rows: consecutive tokens in depth-first order form a tile, and one kernel call computes all tiles.
A tile needs only the keys of the tile itself and of the path from the root to the tile's first token. *Levels* use
kernels for rows of different lengths: one call in which each branch attends to itself causally, and one call per level,
in which tokens attend to the whole branch above them. Both layouts are computed once for all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_agentrl.types.transfer import integers

TILE = 32  # queries
TILED_DEPTH = 160  # tokens, past included; up to this row length, tiles are clearly faster than a call per branch
TILES_AT_A_TIME = 64  # tiles whose paths are computed at once

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Tiles:
    """T tiles of L tokens each, the last tile padded, and the K keys that each tile reads."""

    keys: Tensor  # [T, K] int64, indices into the keys of the past and the layout; arbitrary for masked keys
    bias: Tensor  # [T, 1, L, K] float32, 0 where the query may attend to the key, -inf elsewhere

    def cut(self, x: Tensor) -> Tensor:
        """Cut a tensor of queries [H, N, …] into tiles [T, H, L, …]."""
        count, length = self.bias.shape[0], self.bias.shape[2]
        return pad(x, (0, 0, 0, count * length - x.shape[1])).unflatten(1, (count, length)).transpose(0, 1)

    def gather(self, x: Tensor) -> Tensor:
        """Gather a tensor of keys or values [G, P + N, …] for each tile: [T, G, K, …]."""
        return x.index_select(1, self.keys.flatten()).unflatten(1, self.keys.shape).transpose(0, 1)

    def add_up(self, x: Tensor, count: int) -> Tensor:
        """Sum gradients of each tile's keys [T, G, K, D] over tiles: [G, ``count``, D] with ``count`` = P + N."""
        return x.new_zeros(x.shape[1], count, x.shape[3]).index_add_(1, self.keys.flatten(), join(x))


def join(x: Tensor) -> Tensor:
    """Concatenate tiles [T, H, L, …] along the tokens: [H, T * L, …]."""
    return x.transpose(0, 1).flatten(1, 2)


def lay_tiles(ends: Tensor, positions: Tensor, past: int) -> Tiles:
    """Cut a prefix tree into tiles.

    Args:
        ends: [N], end of the subtree of each token's branch.
        positions: [N], position of each token within its rows.
        past: number of keys before the tree; all tokens see these keys.
    """
    count, device = len(ends), ends.device
    order = torch.arange(count, device=device)
    firsts_T1, within_L = order[::TILE, None], torch.arange(TILE, device=device)
    queries_TL = firsts_T1 + within_L
    depths_T1 = positions[firsts_T1]  # length of the path above each tile
    depth = int(depths_T1.max())
    path_TD = firsts_T1.new_zeros(len(firsts_T1), depth)
    for paths, firsts in zip(path_TD.split(TILES_AT_A_TIME), firsts_T1.split(TILES_AT_A_TIME), strict=True):
        tile, place = ((order < firsts) & (ends > firsts)).nonzero(as_tuple=True)
        paths[tile, positions[place]] = place
    keys_TK = torch.cat([path_TD, queries_TL.clamp_max(count - 1)], 1)
    there_TK = torch.cat([torch.arange(depth, device=device) < depths_T1, queries_TL < count], 1)[:, None]
    seen_TLK = (keys_TK[:, None] <= queries_TL[..., None]) & (queries_TL[..., None] < ends[keys_TK][:, None]) & there_TK
    # Padding queries attend to all keys of their tile so that softmax is defined.
    seen_TLK[-1, count - int(firsts_T1[-1]) :] = True
    if past:
        keys_TK = torch.cat([torch.arange(past, device=device).expand(len(keys_TK), -1), keys_TK + past], 1)
        seen_TLK = pad(seen_TLK, (past, 0), value=True)
    bias = torch.zeros(seen_TLK.shape, device=device).masked_fill_(~seen_TLK, float("-inf"))
    return Tiles(keys_TK, bias[:, None])


def with_sink(out: Tensor, lse: Tensor, sink_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add a sink, one more score with a zero value vector, to attention [*, H, N, D] and log-sum-exps [*, H, N].

    The backward pass of a kernel, given the returned output and log-sum-exps, computes the correct gradients of
    queries, keys and values.

    Source: attention sinks of gpt-oss (OpenAI 2025, arXiv 2508.10925).
    """
    if sink_H is None:
        return out, lse
    total = torch.logaddexp(lse, sink_H.to(lse.dtype)[:, None])
    return out * (lse - total).exp()[..., None].to(out.dtype), total


def sink_gradient(grad_HND: Tensor, out_HND: Tensor, lse_HN: Tensor, sink_H: Tensor | None) -> Tensor | None:
    """Return the gradient [H] of sinks, given the output and the log-sum-exps, both of which include the sinks."""
    if sink_H is None:
        return None
    shares = (sink_H.to(lse_HN.dtype)[:, None] - lse_HN).exp()
    return -(shares * (grad_HND * out_HND).sum(-1).to(shares.dtype)).sum(-1).to(sink_H.dtype)


class TiledAttention(torch.autograd.Function):
    """Attention [H, N, D] of queries [H, N, D] to keys and values [G, P + N, D], all tiles in one call on the CPU.

    Each head may have a sink; sinks have shape [H]. Attention is computed in float32 even under bfloat16 autocast, like
    :class:`BranchedAttention`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_HND: Tensor,
        key_GND: Tensor,
        value_GND: Tensor,
        sink_H: Tensor | None,
        tiles: Tiles,
        scale: float,
    ) -> Tensor:
        dtype = torch.promote_types(query_HND.dtype, torch.float32)
        q, k, v = (
            part(x.to(dtype))
            for part, x in ((tiles.cut, query_HND), (tiles.gather, key_GND), (tiles.gather, value_GND))
        )
        bias = tiles.bias.to(dtype)
        out, lse = flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        out, lse = with_sink(out, lse, sink_H)
        ctx.save_for_backward(query_HND, key_GND, value_GND, sink_H, out, lse)
        ctx.tiles, ctx.scale, ctx.dtype = tiles, scale, dtype
        return join(out)[:, : query_HND.shape[1]].to(value_GND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        tiles, count = ctx.tiles, key.shape[1]
        grad, q = (tiles.cut(x.to(ctx.dtype)) for x in (grads[0], query))
        k, v = (tiles.gather(x.to(ctx.dtype)) for x in (key, value))
        dq, dk, dv = flash_backward(
            grad, q, k, v, out, lse, 0.0, False, attn_mask=tiles.bias.to(ctx.dtype), scale=ctx.scale
        )
        at_queries = join(dq)[:, : query.shape[1]]
        return (
            at_queries.to(query.dtype),
            tiles.add_up(dk, count).to(key.dtype),
            tiles.add_up(dv, count).to(value.dtype),
            sink_gradient(join(grad), join(out), join(lse), sink),
            None,
            None,
        )


MOST_LEVELS = 4  # one kernel call per level; with more levels, launching FlexAttention takes less CPU time
ROW_BLOCK = 128  # queries; the backward pass pads each row to a multiple of this
MOST_QUERIES = 2**16  # padded queries of one call, which take 32 MiB for a head of width 128

Places = slice | Tensor  # indices of tokens in the layout: a slice if they are contiguous, else an int64 tensor


@dataclass(frozen=True, slots=True)
class Level:
    """S rows of queries, and for each row the keys that its queries see, in the order of the layout."""

    queries: Places
    keys: Places
    query_bounds: Tensor  # [S + 1] int32, cumulative lengths of the rows of queries
    key_bounds: Tensor  # [S + 1] int32, cumulative lengths of the rows of keys
    most_queries: int  # largest number of queries in a row
    most_keys: int  # largest number of keys in a row
    causal: bool  # True: each row is a branch with causal attention; False: queries see all keys of their row


@dataclass(frozen=True, slots=True)
class Span:
    """A branch of the tree: its tokens, and the end of its subtree."""

    start: int
    stop: int
    end: int


def lay_levels(spans: Sequence[Span], device: torch.device) -> tuple[Level, ...] | None:
    """Return the kernel calls of a tree: all branches as one causal level, then inner branches by depth from the root.

    Returns None if there are more than ``MOST_LEVELS`` levels, or if padding the rows would take too much memory.

    Args:
        spans: branches in depth-first order, each beginning where the previous branch stops.
        device: device of the returned tensors.
    """
    above: list[int] = []  # ends of the branches that contain the current branch
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
    """Return whether torch's FlashAttention kernels support the query's dtype, head width and GPU.

    For head widths of 200 to 224, workstation GPUs have too little shared memory to compute gradients.
    """
    half, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    fits = width % 8 == 0 and (width <= 192 or 224 < width <= 256)
    return half and fits and _has_flash_attention(query.device)


@cache
def _has_flash_attention(device: torch.device) -> bool:
    available = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return available and torch.cuda.get_device_capability(device) >= (8, 0)


def flash_rows(q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, level: Level, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention outputs [Q, H, D] and float32 log-sum-exps [H, Q] of the queries of one tree level."""
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
    """Return the gradients of queries, keys and values, given outputs and log-sum-exps, optionally merged."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q_QHD.device)
    grads = torch.ops.aten._flash_attention_backward(
        # The kernel ignores strides of the log-sum-exps.
        *(grad_QHD, q_QHD, k_KGD, v_KGD, out_QHD, lse_HQ.contiguous(), level.query_bounds, level.key_bounds),
        *(level.most_queries, level.most_keys, 0.0, level.causal, no_dropout, no_dropout),
        scale=scale,
    )
    return tuple(grads)


class LevelledAttention(torch.autograd.Function):
    """Attention [N, H, D] of queries [N, H, D] to keys and values [N, G, D], one kernel call per level.

    Each head may have a sink; sinks have shape [H].

    Outputs of the calls are merged by their log-sum-exps. In the backward pass each call takes the merged output and
    log-sum-exps, so that the gradients of the calls add up exactly, as in :class:`BranchedAttention`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_NGD: Tensor,
        v_NGD: Tensor,
        sink_H: Tensor | None,
        levels: tuple[Level, ...],
        scale: float,
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
        if sink_H is not None:
            out_HND, lse = with_sink(out.transpose(0, 1), lse, sink_H)
            out = out_HND.transpose(0, 1).contiguous()
        ctx.save_for_backward(q_NHD, k_NGD, v_NGD, sink_H, out, lse)
        ctx.levels, ctx.scale = levels, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
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
        return dq, dk, dv, sink_gradient(grad.transpose(0, 1), out.transpose(0, 1), lse, sink), None, None
