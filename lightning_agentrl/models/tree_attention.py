"""Attention over a prefix tree, exact, and without the N x N scores of a dense mask.

The function is registered with transformers as the attention implementation ``tree``. Models pass it the tree as the
keyword ``tree`` of their forward pass; without it (sampling, single rows) it is transformers' ``sdpa``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lightning_agentrl.models.branches import BranchedAttention
from lightning_agentrl.models.flex import fits_flex, flex_tree_attention
from lightning_agentrl.models.levels import LevelledAttention, fits_levels
from lightning_agentrl.models.prefix_tree import PrefixTree
from lightning_agentrl.models.tiles import TILED_DEPTH, TiledAttention

TREE = "tree"  # name of the attention implementation in transformers
_NO_MASK_SHAPE = (0, 0, 0, 0)


def no_mask(device: torch.device) -> Tensor:
    """Return the mask to give a model with a tree: one with four dimensions is passed on unchanged."""
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
    tree: PrefixTree | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return [1, N, H, D] of queries [1, H, N, D], keys and values [1, G, P + N, D]; the interface of transformers.

    The first P keys, if any, are a past that all rows of the tree share; only without gradients.
    """
    if tree is None:
        if attention_mask is not None and tuple(attention_mask.shape) == _NO_MASK_SHAPE:
            raise ValueError(f"{type(module).__name__} does not pass the prefix tree on to its attention")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window=sliding_window, **kwargs
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__} changes its attention scores ({', '.join(unknown)})")
    past = key.shape[2] - query.shape[2]
    window = sliding_window if sliding_window is not None and sliding_window < past + tree.depth else None
    if query.device.type == "cpu" and window is None and not dropout:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if past + tree.depth <= TILED_DEPTH:
            out = TiledAttention.apply(query[0], key[0], value[0], tree.tiles(past), scale)
        else:
            out = BranchedAttention.apply(query[0], key[0], value[0], tree.blocks, scale)
        return cast(Tensor, out).transpose(0, 1)[None], None
    if query.device.type == "cuda" and not past and not dropout:
        query, key, value = as_autocast(query, key, value)
        if window is None and fits_levels(query) and tree.levels is not None:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            rows = (x[0].transpose(0, 1) for x in (query, key, value))
            return cast(Tensor, LevelledAttention.apply(*rows, tree.levels, scale))[None], None
        if fits_flex(query):
            return flex_tree_attention(query, key, value, tree.block_mask(window), scaling, window is not None), None
    return sdpa_attention_forward(module, query, key, value, tree.mask(window, past)[None, None], dropout, scaling)


def as_autocast(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return what a GPU's attention reads in the dtype of autocast, as torch does for its own.

    Positions have made float32 of queries and keys.
    """
    return tuple(x.to(torch.get_autocast_dtype("cuda")) for x in parts) if torch.is_autocast_enabled("cuda") else parts


AttentionInterface.register(TREE, tree_attention_forward)
AttentionMaskInterface.register(TREE, sdpa_mask)
