"""Attention over a prefix tree of short rows, in one call of a kernel: tiles of neighbouring tokens, side by side.

The layout is depth-first, so what the tokens of a tile see outside it lies on the path to the first of them. A tile
reads that path and itself, which is little more than its tokens see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 32  # queries
TILED_DEPTH = 160  # longest rows, with their past, of which tiles are clearly faster than a call for each branch
TILES_AT_A_TIME = 64  # while paths are looked for

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Tiles:
    """T tiles of L tokens each, the last one filled up, and the K keys of each."""

    keys: Tensor  # [T, K] int64, places among the keys of the past and the layout; any place where nothing is seen
    bias: Tensor  # [T, 1, L, K] float32, 0 where the query may attend to the key, else -inf

    def cut(self, x: Tensor) -> Tensor:
        """Return [T, H, L, …] of what the queries have, [H, N, …]."""
        count, length = self.bias.shape[0], self.bias.shape[2]
        return pad(x, (0, 0, 0, count * length - x.shape[1])).unflatten(1, (count, length)).transpose(0, 1)

    def gather(self, x: Tensor) -> Tensor:
        """Return [T, G, K, …] of what the keys have, [G, P + N, …]."""
        return x.index_select(1, self.keys.flatten()).unflatten(1, self.keys.shape).transpose(0, 1)

    def add_up(self, x: Tensor, count: int) -> Tensor:
        """Return [G, P + N, D], the sums over tiles of [T, G, K, D]."""
        return x.new_zeros(x.shape[1], count, x.shape[3]).index_add_(1, self.keys.flatten(), join(x))


def join(x: Tensor) -> Tensor:
    """Return [H, T * L, …] of [T, H, L, …]."""
    return x.transpose(0, 1).flatten(1, 2)


def lay_tiles(ends: Tensor, positions: Tensor, past: int) -> Tiles:
    """Cut a prefix tree into tiles.

    Args:
        ends: [N], the end of the subtree that each token begins or belongs to.
        positions: [N], of each token within its rows.
        past: number of keys before the tree, which all tokens see.
    """
    count, device = len(ends), ends.device
    order = torch.arange(count, device=device)
    firsts_T1, within_L = order[::TILE, None], torch.arange(TILE, device=device)
    queries_TL = firsts_T1 + within_L
    depths_T1 = positions[firsts_T1]  # lengths of the paths
    depth = int(depths_T1.max())
    path_TD = firsts_T1.new_zeros(len(firsts_T1), depth)
    for paths, firsts in zip(path_TD.split(TILES_AT_A_TIME), firsts_T1.split(TILES_AT_A_TIME), strict=True):
        tile, place = ((order < firsts) & (ends > firsts)).nonzero(as_tuple=True)
        paths[tile, positions[place]] = place
    keys_TK = torch.cat([path_TD, queries_TL.clamp_max(count - 1)], 1)
    there_TK = torch.cat([torch.arange(depth, device=device) < depths_T1, queries_TL < count], 1)[:, None]
    seen_TLK = (keys_TK[:, None] <= queries_TL[..., None]) & (queries_TL[..., None] < ends[keys_TK][:, None]) & there_TK
    seen_TLK[-1, count - int(firsts_T1[-1]) :] = True  # queries that only fill up: of no key at all there is no softmax
    if past:
        keys_TK = torch.cat([torch.arange(past, device=device).expand(len(keys_TK), -1), keys_TK + past], 1)
        seen_TLK = pad(seen_TLK, (past, 0), value=True)
    bias = torch.zeros(seen_TLK.shape, device=device).masked_fill_(~seen_TLK, float("-inf"))
    return Tiles(keys_TK, bias[:, None])


class TiledAttention(torch.autograd.Function):
    """Attention [H, N, D] of queries [H, N, D] to keys and values [G, P + N, D], all tiles in one call on the CPU.

    Computed in float32 even under bfloat16 autocast, as attention of long rows is.
    """

    @staticmethod
    def forward(ctx: Any, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, tiles: Tiles, scale: float) -> Tensor:
        dtype = torch.promote_types(query_HND.dtype, torch.float32)
        q, k, v = (
            part(x.to(dtype))
            for part, x in ((tiles.cut, query_HND), (tiles.gather, key_GND), (tiles.gather, value_GND))
        )
        bias = tiles.bias.to(dtype)
        out, lse = flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        ctx.save_for_backward(query_HND, key_GND, value_GND, out, lse)
        ctx.tiles, ctx.scale, ctx.dtype = tiles, scale, dtype
        return join(out)[:, : query_HND.shape[1]].to(value_GND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
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
            None,
            None,
        )
