"""Attention over a prefix tree by FlexAttention: of any dtype, any depth and with windows, where its kernel runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

GRAPHS = 64  # the most of FlexAttention; dynamo's own limit is 8
# Not its kernel for few queries: where several heads share keys, that one has no blocks for 65 to 127 tokens.
FLEX_OPTIONS: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None, windowed: bool = False
) -> Tensor:
    """Return [1, N, H, D] of queries [1, H, N, D], keys and values [1, G, N, D].

    Args:
        query: of the tokens of a tree, as keys and values.
        key: as said.
        value: as said.
        mask: of the tree.
        scale: of the scores; None: one over the root of D.
        windowed: whether the mask reads positions, too.
    """
    heads, shared = query.shape[1], query.shape[1] // key.shape[1]
    if heads & (heads - 1):  # only powers of two can be shared, as transformers has it too
        key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
    if torch._dynamo.config.recompile_limit < GRAPHS:  # each thread may have its own
        torch._dynamo.config.recompile_limit = GRAPHS  # and it stays: another thread may be compiling
    memory = _shared_memory(query.device) if query.is_cuda else math.inf
    options = flex_options(query.shape[-1], query.itemsize, memory, windowed)
    out = compiled_flex()(
        query, key, value, block_mask=mask, enable_gqa=shared > 1, scale=scale, kernel_options=options
    )
    return cast(Tensor, out).transpose(1, 2).contiguous()


@cache
def compiled_flex(backend: str = "inductor") -> Callable[..., Any]:
    """Return FlexAttention, compiled.

    Beyond a limit of graphs dynamo would go on without compiling, with all scores in memory. A whole graph ends with an
    error there. A model needs several without and with gradients, for each of its windows.
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
    """Return the options of FlexAttention's kernels, with smaller or fewer blocks where its own do not fit.

    Its own were chosen for large GPUs and for a few widths; where they do not fit, a run would end in a traceback. What
    they need is what Triton counts for the kernels of torch 2.13.

    Args:
        width: of the heads, which the kernels fill up to a power of two.
        itemsize: bytes of a number.
        shared_memory: bytes that a block of threads can have.
        windowed: whether the mask reads positions, too.
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
