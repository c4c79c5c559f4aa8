"""Attention over a prefix tree of long rows on a CPU: a call of a kernel for each large branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.models.prefix_tree import Block
from lightning_agentrl.models.tiles import flash, flash_backward, join


class BranchedAttention(torch.autograd.Function):
    """One call of torch's CPU kernel per block of keys, for all queries that see it, merged by their log-sum-exps.

    A branch's own queries see it causally, those further below see all of it, which is what ``is_causal`` means where
    there are more queries than keys. In the backward pass each call takes the merged output and log-sum-exp, so that
    the probabilities it recomputes are those of the whole row, and the gradients of the calls add up exactly.

    Computed in float32 even under bfloat16 autocast: without matrix units for bfloat16 this is faster and no less
    exact.
    """

    @staticmethod
    def forward(
        ctx: Any, query_HND: Tensor, key_GND: Tensor, value_GND: Tensor, blocks: tuple[Block, ...], scale: float
    ) -> Tensor:
        dtype = torch.promote_types(query_HND.dtype, torch.float32)
        q, k, v = query_HND.to(dtype), key_GND.to(dtype), value_GND.to(dtype)
        past = k.shape[1] - q.shape[1]
        if past:
            out, lse = (x[0] for x in flash(q[None], k[None, :, :past], v[None, :, :past], 0.0, False, scale=scale))
            k, v = k[:, past:], v[:, past:]
        else:
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for block in blocks:
            queries, keys, n = slice(block.start, block.end), slice(block.start, block.stop), block.copies
            part, part_lse = flash(
                *(_cut(x, places, n) for x, places in ((q, queries), (k, keys), (v, keys))),
                0.0,
                block.bias is None,
                attn_mask=_bias(block, dtype),
                scale=scale,
            )
            part, part_lse = join(part), join(part_lse)
            if block.root and not past:
                out[:, queries], lse[:, queries] = part, part_lse
            else:
                above = lse[:, queries]
                total = torch.logaddexp(above, part_lse)
                out[:, queries] *= (above - total).exp_()[..., None]
                out[:, queries] += part * (part_lse - total).exp_()[..., None]
                lse[:, queries] = total
        ctx.save_for_backward(query_HND, key_GND, value_GND, out, lse)
        ctx.blocks, ctx.scale, ctx.dtype = blocks, scale, dtype
        return out.to(value_GND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        if key.shape[1] != query.shape[1]:
            raise NotImplementedError("a past has no gradients")
        q, k, v, grad = (x.to(ctx.dtype) for x in (query, key, value, grads[0]))
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block in ctx.blocks:
            queries, keys, n = slice(block.start, block.end), slice(block.start, block.stop), block.copies
            at_queries = [_cut(x, queries, n) for x in (grad, q)]
            at_keys = [_cut(x, keys, n) for x in (k, v)]
            merged = [_cut(x, queries, n) for x in (out, lse)]
            part, *at_own = flash_backward(
                *(*at_queries, *at_keys, *merged),
                0.0,
                block.bias is None,
                attn_mask=_bias(block, ctx.dtype),
                scale=ctx.scale,
            )
            if block.root:
                dq[:, queries] = join(part)
            else:
                dq[:, queries] += join(part)
            dk[:, keys], dv[:, keys] = (join(x) for x in at_own)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


def _bias(block: Block, dtype: torch.dtype) -> Tensor | None:
    return None if block.bias is None else block.bias[None, None].to(dtype)


def _cut(x: Tensor, places: slice, copies: int) -> Tensor:
    """Return [copies, H, length, …] of [H, N, …]."""
    x = x[:, places]
    return x[None] if copies == 1 else x.unflatten(1, (copies, -1)).transpose(0, 1)
