"""Exact attention over a prefix tree, without the N x N scores of a dense mask.

:func:`tree_attention_forward` is registered with transformers as the attention implementation ``tree``. Models pass the
keyword ``tree`` of their forward pass to this function; without a tree (sampling, single rows) the function calls
transformers' ``sdpa``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_agentrl.models.attention.flash import (
    TILED_DEPTH,
    LevelledAttention,
    TiledAttention,
    fits_levels,
    flash,
    flash_backward,
    join,
    sink_gradient,
    with_sink,
)
from lightning_agentrl.models.prefix_tree import Block, PrefixTree
from lightning_agentrl.models.sequence import Shard


class BranchedAttention(torch.autograd.Function):
    """Attention by one call of torch's CPU kernel per block of keys, for all queries that see the block.

    Outputs are merged by their log-sum-exps. Queries of a branch see the branch's keys causally, and queries below the
    branch see all of these keys; ``is_causal`` means this if there are more queries than keys. In the backward pass
    each call takes the merged output and log-sum-exp and so recomputes the probabilities of the whole row; the
    gradients of the calls add up exactly. Each head may have a sink; sinks have shape [H].

    Attention is computed in float32 even under bfloat16 autocast: on CPUs without matrix units for bfloat16, float32 is
    faster and no less exact.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_HND: Tensor,
        key_GND: Tensor,
        value_GND: Tensor,
        sink_H: Tensor | None,
        blocks: tuple[Block, ...],
        scale: float,
    ) -> Tensor:
        dtype = torch.promote_types(query_HND.dtype, torch.float32)
        q, k, v = query_HND.to(dtype), key_GND.to(dtype), value_GND.to(dtype)
        past = k.shape[1] - q.shape[1]
        if past:
            out, lse = flash(q[None], k[None, :, :past], v[None, :, :past], 0.0, False, scale=scale)
            out, lse, k, v = out[0], lse[0], k[:, past:], v[:, past:]
        else:
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
        for block in blocks:
            queries, keys, n = slice(block.start, block.end), slice(block.start, block.stop), block.copies
            part, part_lse = flash(
                _cut(q, queries, n),
                _cut(k, keys, n),
                _cut(v, keys, n),
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
        out, lse = with_sink(out, lse, sink_H)
        ctx.save_for_backward(query_HND, key_GND, value_GND, sink_H, out, lse)
        ctx.blocks, ctx.scale, ctx.dtype = blocks, scale, dtype
        return out.to(value_GND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, out, lse = ctx.saved_tensors
        if key.shape[1] != query.shape[1]:
            raise NotImplementedError("a past has no gradients")
        q, k, v, grad = query.to(ctx.dtype), key.to(ctx.dtype), value.to(ctx.dtype), grads[0].to(ctx.dtype)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block in ctx.blocks:
            queries, keys, n = slice(block.start, block.end), slice(block.start, block.stop), block.copies
            part, part_k, part_v = flash_backward(
                _cut(grad, queries, n),
                _cut(q, queries, n),
                _cut(k, keys, n),
                _cut(v, keys, n),
                _cut(out, queries, n),
                _cut(lse, queries, n),
                0.0,
                block.bias is None,
                attn_mask=_bias(block, ctx.dtype),
                scale=ctx.scale,
            )
            if block.root:
                dq[:, queries] = join(part)
            else:
                dq[:, queries] += join(part)
            dk[:, keys], dv[:, keys] = join(part_k), join(part_v)
        at_sink = sink_gradient(grad, out, lse, sink)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), at_sink, None, None


def _bias(block: Block, dtype: torch.dtype) -> Tensor | None:
    return None if block.bias is None else block.bias[None, None].to(dtype)


def _cut(x: Tensor, places: slice, copies: int) -> Tensor:
    """Cut ``places`` out of [H, N, …] and split them into equal copies: [copies, H, length, …]."""
    x = x[:, places]
    return x[None] if copies == 1 else x.unflatten(1, (copies, -1)).transpose(0, 1)


GRAPHS = 64  # largest number of compiled graphs of FlexAttention; dynamo's default is 8
# Never use FlexAttention's kernel for few queries: if several heads share keys, that kernel has no block size for 65 to
# 127 tokens.
FLEX_OPTIONS: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float | None,
    windowed: bool = False,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute attention [1, N, H, D] over the tokens of a tree by FlexAttention.

    Args:
        query: queries [1, H, N, D].
        key: keys [1, G, N, D].
        value: values [1, G, N, D].
        mask: block mask of the tree.
        scale: factor of the scores; None: 1 / sqrt(D).
        windowed: whether the mask also depends on positions, as with a sliding window.
        sink: [H], one more score per head, with a zero value vector.
    """
    heads, shared = query.shape[1], query.shape[1] // key.shape[1]
    if heads & (heads - 1):  # FlexAttention shares keys only if the number of heads is a power of two
        key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
    if torch._dynamo.config.recompile_limit < GRAPHS:  # each thread may have a separate limit
        torch._dynamo.config.recompile_limit = GRAPHS  # never lower the limit again: another thread may be compiling
    memory = _shared_memory(query.device) if query.is_cuda else math.inf
    options = flex_options(query.shape[-1], query.itemsize, memory, windowed)
    out = compiled_flex()(
        query,
        key,
        value,
        block_mask=mask,
        enable_gqa=shared > 1,
        scale=scale,
        kernel_options=options,
        return_lse=sink is not None,
    )
    if sink is not None:
        out, _ = with_sink(out[0], out[1], sink)
    return cast(Tensor, out).transpose(1, 2).contiguous()


@cache
def compiled_flex(backend: str = "inductor") -> Callable[..., Any]:
    """Return compiled FlexAttention.

    Beyond its limit of graphs dynamo would silently run uncompiled, with all scores in memory; with ``fullgraph`` it
    raises an error instead. A model needs several graphs, with and without gradients, for each of its windows.
    """
    return torch.compile(flex_attention, fullgraph=True, backend=backend)


def fits_flex(query: Tensor) -> bool:
    """Return whether FlexAttention's kernel supports the query: no float64, no heads narrower than 16."""
    return query.dtype != torch.float64 and query.shape[-1] >= 16


@cache
def _shared_memory(device: torch.device) -> float:
    return float(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", math.inf))


@cache
def flex_options(width: int, itemsize: int, shared_memory: float, windowed: bool = False) -> dict[str, Any]:
    """Return options of FlexAttention's kernels, with smaller blocks or fewer stages if the defaults do not fit.

    The default options were chosen for large GPUs and a few head widths; on other GPUs the kernels can fail to launch.
    The thresholds are the amounts of shared memory that Triton reports for the kernels of torch 2.13.

    Args:
        width: width of the heads, which kernels pad to a power of two.
        itemsize: bytes per number.
        shared_memory: shared memory available to a thread block, in bytes.
        windowed: whether the mask also depends on positions, as with a sliding window.
    """
    row, known = itemsize * 2 ** (width - 1).bit_length(), not width & (width - 1)
    if row <= 256:
        fits = row < 256 or not windowed or shared_memory >= 103_000
        return FLEX_OPTIONS if fits else {**FLEX_OPTIONS, "num_stages": 2}
    if row <= 512:
        needed: float = 155_000 if known or itemsize < 4 else 185_000
    else:
        needed = 200_000 if known and itemsize == 4 else math.inf
    if shared_memory >= needed:
        return FLEX_OPTIONS
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
    return {**FLEX_OPTIONS, **dict.fromkeys(names, 32 if row <= 512 else 16), "num_stages": 1, "num_warps": 4}


TREE = "tree"  # name of the attention implementation in transformers
_NO_MASK_SHAPE = (0, 0, 0, 0)


def no_mask(device: torch.device) -> Tensor:
    """Return an empty mask to pass to a model with a tree; transformers passes on 4-dimensional masks unchanged."""
    return torch.empty(_NO_MASK_SHAPE, dtype=torch.bool, device=device)


@torch.compiler.disable  # branches differ from batch to batch
def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: PrefixTree | Shard | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention over a tree, with the signature of transformers' attention functions.

    Takes queries [1, H, N, D] and keys and values [1, G, P + N, D], and returns [1, N, H, D]. The first P keys, if any,
    are a past that all rows of the tree share; a past has no gradients. Values may differ from keys in width, and heads
    may have sinks, ``s_aux`` [H]. With a :class:`Shard`, N counts this rank's tokens.
    """
    if tree is None:
        if attention_mask is not None and tuple(attention_mask.shape) == _NO_MASK_SHAPE:
            raise ValueError(f"{type(module).__name__} does not pass the prefix tree on to its attention")
        if s_aux is not None:
            return dense_attention(query, key, value, attention_mask, scaling, s_aux), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **kwargs
        )
    unknown = [name for name in ("softcap", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__} changes its attention scores ({', '.join(unknown)})")
    width = value.shape[-1]
    if width != query.shape[-1]:  # kernels require queries, keys and values of one width
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        most = max(width, query.shape[-1])
        query, key, value = (F.pad(x, (0, most - x.shape[-1])) for x in (query, key, value))
        whole = (module, query, key, value, attention_mask, dropout, scaling, tree, sliding_window, s_aux)
        out, weights = tree_attention_forward(*whole, **kwargs)
        return out[..., :width].contiguous(), weights
    if isinstance(tree, Shard):
        dtype, sinks = value.dtype, None if s_aux is None else tree.own_heads(s_aux)
        query, key, value = tree.to_heads(*as_autocast(query, key, value))
        out, _ = tree_attention_forward(
            module, query, key, value, None, dropout, scaling, tree.tree, sliding_window, sinks
        )
        return tree.to_tokens(out).to(dtype), None
    past = key.shape[2] - query.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < past + tree.depth else None
    causal = tree.starts is None  # the CPU kernels have no mask for bidirectional images
    if query.device.type == "cpu" and window is None and causal and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if past + tree.depth <= TILED_DEPTH:
            out = TiledAttention.apply(query[0], key[0], value[0], s_aux, tree.tiles(past), scale)
        else:
            out = BranchedAttention.apply(query[0], key[0], value[0], s_aux, tree.blocks, scale)
        return cast(Tensor, out).transpose(0, 1)[None].contiguous(), None
    if query.device.type == "cuda" and not past and not dropout:
        query, key, value = as_autocast(query, key, value)
        if window is None and causal and fits_levels(query) and tree.levels is not None:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            rows = (x[0].transpose(0, 1) for x in (query, key, value))
            return cast(Tensor, LevelledAttention.apply(*rows, s_aux, tree.levels, scale))[None], None
        if fits_flex(query):
            windowed = window is not None
            return flex_tree_attention(query, key, value, tree.block_mask(window), scaling, windowed, s_aux), None
    seen = tree.mask(window, past)[None, None]
    # sdpa repeats keys by the module's ratio of heads, but a shard's ratio of queries to keys can differ from the
    # module's ratio.
    if s_aux is not None or query.shape[1] != key.shape[1] * getattr(module, "num_key_value_groups", 1):
        return dense_attention(query, key, value, seen, scaling, s_aux), None
    return sdpa_attention_forward(module, query, key, value, seen, dropout, scaling)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float | None, sink_H: Tensor | None
) -> Tensor:
    """Compute attention [B, N, H, D] with a dense mask and, optionally, sinks.

    Args:
        query: queries [B, H, N, D].
        key: keys [B, G, M, D].
        value: values [B, G, M, D].
        seen: [B, 1, N, M], True if the query may attend to the key; None: a causal mask.
        scaling: factor of the scores; None: 1 / sqrt(D).
        sink_H: score of the sink of each head; None: no sinks.
    """
    count, keys = query.shape[2], key.shape[2]
    if seen is None:
        seen = torch.ones(count, keys, dtype=torch.bool, device=query.device).tril(keys - count)[None, None]
    bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, float("-inf"))
    bias = bias.expand(query.shape[0], query.shape[1], count, keys)
    if sink_H is not None:
        sinks = sink_H.to(query.dtype)[None, :, None, None].expand(*bias.shape[:3], 1)
        key, value, bias = *(F.pad(x, (0, 0, 0, 1)) for x in (key, value)), torch.cat([bias, sinks], -1)
    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, bias, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2).contiguous()


def as_autocast(*parts: Tensor) -> tuple[Tensor, ...]:
    """Cast queries, keys and values to autocast's dtype on a GPU, as autocast does for torch's own attention.

    Rotary embeddings have turned queries and keys into float32.
    """
    return tuple(x.to(torch.get_autocast_dtype("cuda")) for x in parts) if torch.is_autocast_enabled("cuda") else parts


AttentionInterface.register(TREE, tree_attention_forward)
AttentionMaskInterface.register(TREE, sdpa_mask)
