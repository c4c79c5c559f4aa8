"""Batch of token rows with their cached keys and values, and prefill of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

from lightning_agentrl.models.attention.tree import no_mask
from lightning_agentrl.models.language_model import LanguageModel, read_tokens
from lightning_agentrl.models.loading import UNIQUE_POSITIONS
from lightning_agentrl.models.prefix_tree import Keys, common_prefix_length, lay_out
from lightning_agentrl.models.vision import PackedImages, find_tokens, text_decoder
from lightning_agentrl.types.model_input import ModelInput
from lightning_agentrl.types.transfer import integers

LEAST_PREFIX = 8  # tokens; computing a shorter prefix again costs less than caching


@dataclass(frozen=True)
class Conversation:
    """Cached row of a finished reply: the prefix-tree keys of its L tokens, and each layer's keys and values."""

    keys: Keys
    layers: Sequence[tuple[Tensor, Tensor]]  # keys and values [heads, L, D] of each layer
    next: int  # position of the next token; may be below L, since an image spans fewer positions than tokens


@dataclass
class Rows:
    """Batch of B token rows, left-padded so that all rows end in the same column."""

    cache: DynamicCache
    seen: Tensor  # [B, L] int64, 1 on tokens, 0 on padding
    positions: Tensor  # [B, 1] int64, positions of the last tokens; last tokens are always text

    def read_on(self, policy: LanguageModel, tokens_B: Sequence[int]) -> Tensor:
        """Run the model on one more token of each row and return hidden states [B, H]."""
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(tokens_B), 1)], 1)
        self.positions = self.positions + 1
        ids = torch.tensor(tokens_B, device=self.seen.device)[:, None]
        return read(policy, ids, self.positions, attention_mask=self.seen, cache=self.cache)[:, -1]

    def kept(self, rows: Sequence[int]) -> Rows:
        """Return a subset of the rows, without columns that contain only padding. All layers must hold whole rows."""
        places = torch.tensor(rows, device=self.seen.device)
        first = self.seen.shape[1] - int(self.seen[places].sum(1).max())
        cache = cache_of((keys[places, :, first:], values[places, :, first:]) for keys, values in layers_of(self.cache))
        return Rows(cache, self.seen[places, first:], self.positions[places])

    def joined(self, others: Rows) -> Rows:
        """Return these rows followed by ``others``. All layers must hold whole rows."""
        width = max(self.seen.shape[1], others.seen.shape[1])
        seen = torch.cat([pad(rows.seen, (width - rows.seen.shape[1], 0)) for rows in (self, others)])
        both = zip(layers_of(self.cache), layers_of(others.cache), strict=True)
        cache = cache_of(
            [torch.cat([pad(x, (0, 0, width - x.shape[2], 0)) for x in pair]) for pair in zip(*layers, strict=True)]
            for layers in both
        )
        return Rows(cache, seen, torch.cat([self.positions, others.positions]))

    def conversation(self, row: int, keys: Keys) -> Conversation:
        """Return a copy of one row, whose tokens have the prefix-tree keys ``keys``."""
        layers = [(k[row, :, -len(keys) :].clone(), v[row, :, -len(keys) :].clone()) for k, v in layers_of(self.cache)]
        return Conversation(keys, layers, int(self.positions[row]) + 1)


def layers_of(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values [B, heads, L, D] of each layer."""
    return [(layer.keys, layer.values) for layer in cast(Any, cache).layers]


def cache_of(layers: Iterable[Sequence[Tensor]]) -> DynamicCache:
    """Return a cache with given keys and values. The cache holds whole rows even if layers have sliding windows."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def read(
    policy: LanguageModel,
    ids: Tensor,
    positions: Tensor,
    images: PackedImages | None = None,
    *,
    cache: DynamicCache,
    **arguments: Any,
) -> Tensor:
    """Return the last hidden states [B, L, H] of one pass over ``ids`` [B, L], which extends the cache."""
    decoder: Any = type(text_decoder(policy.lm))
    arguments[_name_of_cache(decoder)] = cache
    return read_tokens(policy.lm, ids, positions, images, **arguments, use_cache=True)


@lru_cache
def _name_of_cache(decoder: type[nn.Module]) -> str:
    """Return the name of the cache argument of a decoder's forward pass; transformers has renamed the argument."""
    return "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"


class TreePrefill:
    """Prefill as a prefix tree: compute shared prefixes once, and cache the prefix of all prompts between calls.

    Prefixes are compared by prefix-tree keys, so prompts with different images share only the tokens before the images.
    """

    whole_rows: ClassVar[bool] = True  # the cache holds whole rows, so rows can join and leave

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self.forget()

    def forget(self) -> None:
        """Drop the cached prefix, since the weights have changed."""
        self._prefix: Keys = ()
        self._next = 0  # position after the prefix; an image spans fewer positions than tokens
        self._prefix_cache = DynamicCache()

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, Rows]:
        """Prefill prompts.

        Args:
            prompts: prompts to prefill, B of them.
            beside: prompts of the replies that are already being sampled; the cached prefix must be a prefix of these
                prompts, too.

        Returns:
            Hidden states [B, H] of the last tokens of ``prompts``, and their rows.
        """
        self.keep_common_prefix([*prompts, *beside])
        past, device = len(self._prefix), self.policy.lm.device
        layout = lay_out([prompt.keys[past:] for prompt in prompts], device)
        ends = [layout.find(k, (len(prompt) - past - 1,))[0] for k, prompt in enumerate(prompts)]
        cache = cache_of(layers_of(self._prefix_cache))  # a copy, since the model appends to the cache
        positions, images = self._next + layout.tree.positions, [prompt.images for prompt in prompts]
        tokens = find_tokens(layout.keys, positions, layout.tree.ends, images, self.policy.image_reader)
        hidden_N = read(
            self.policy,
            tokens.ids[None],
            tokens.positions[..., None, :],
            tokens.images,
            attention_mask=no_mask(device),
            cache=cache,
            tree=replace(layout.tree, starts=tokens.starts),
            **{UNIQUE_POSITIONS: integers(sorted(set(ends)), device)},
        )[0]
        columns_BL = past + _left_padded([[*range(-past, 0), *layout.places(k)] for k in range(len(prompts))], device)
        rows = cache_of(
            (keys[0][:, columns_BL].transpose(0, 1), values[0][:, columns_BL].transpose(0, 1))
            for keys, values in layers_of(cache)
        )
        return hidden_N[ends], Rows(rows, _seen(prompts, device), _last(tokens.positions)[ends, None])

    def keep_common_prefix(self, prompts: Sequence[ModelInput]) -> None:
        """Cache the prompts' common prefix, unless the cached prefix covers at least half of the common prefix.

        At least one token of each prompt is left out, since its hidden state is needed. A prefix below ``LEAST_PREFIX``
        tokens is not cached. On a GPU no prefix is cached: FlexAttention supports no tree after cached tokens, and
        dense attention would need a mask over all pairs of tokens.
        """
        rows = [prompt.keys for prompt in prompts]
        common = min(common_prefix_length(rows), min(map(len, rows)) - 1)
        common = len(prompts[0].head(common))
        if common < LEAST_PREFIX or self.policy.lm.device.type == "cuda":
            common = 0
        kept = self._prefix
        if common >= len(kept) and rows[0][: len(kept)] == kept and common <= 2 * len(kept):
            return
        self.forget()
        if common:
            self._prefix = rows[0][:common]
            order = torch.arange(common, device=self.policy.lm.device)
            ends, reader = torch.full_like(order, common), self.policy.image_reader
            tokens = find_tokens(self._prefix, order, ends, [prompts[0].images], reader)
            positions = tokens.positions[..., None, :]
            read(self.policy, tokens.ids[None], positions, tokens.images, cache=self._prefix_cache)
            self._next = int(_last(tokens.positions)[-1]) + 1


class PaddedPrefill:
    """Prefill of left-padded prompts, for models whose layers do not support a prefix tree.

    The cache of such layers may have any form, so no row joins or leaves before all rows are done.
    """

    whole_rows: ClassVar[bool] = False

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy

    def forget(self) -> None:
        """Do nothing: there is no cached prefix."""

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, Rows]:
        """Prefill prompts; see :class:`TreePrefill`. ``beside`` is unused."""
        device, cache = self.policy.lm.device, DynamicCache(config=self.policy.lm.config)
        seen = _seen(prompts, device)
        width = seen.shape[1]
        keys = [key for prompt in prompts for key in (*[0] * (width - len(prompt)), *prompt.keys)]
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        ends = torch.arange(1, len(prompts) + 1, device=device).repeat_interleave(width) * width
        images, reader = [prompt.images for prompt in prompts], self.policy.image_reader
        tokens = find_tokens(keys, positions.flatten(), ends, images, reader)
        ids, positions = tokens.ids.view(seen.shape), tokens.positions.unflatten(-1, seen.shape)
        hidden = read(self.policy, ids, positions, tokens.images, attention_mask=seen, cache=cache)
        return hidden[:, -1], Rows(cache, seen, _last(tokens.positions).view(seen.shape)[:, -1:])


def read_on(
    policy: LanguageModel, prompts: Sequence[ModelInput], conversations: Sequence[Conversation]
) -> tuple[Tensor, Rows]:
    """Prefill only the tokens that prompts add to their cached conversations.

    Args:
        policy: model that samples.
        prompts: B prompts.
        conversations: cached conversation that each prompt continues.

    Returns:
        Hidden states [B, H] of the last tokens of the prompts, and their rows.
    """
    device = policy.lm.device
    known = [len(one.keys) for one in conversations]
    new = [prompt.ids[n:] for n, prompt in zip(known, prompts, strict=True)]
    past, width = max(known), max(map(len, new))
    cache = cache_of(
        [torch.stack([pad(x, (0, 0, past - x.shape[1], 0)) for x in side]) for side in zip(*layers, strict=True)]
        for layers in zip(*(one.layers for one in conversations), strict=True)
    )
    # Pad new tokens on the right, where causal attention ignores the padding. Between old and new tokens there is no
    # padding, since layers with a sliding window count columns.
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in new], device=device)
    seen = torch.zeros(len(new), past + width, dtype=torch.int64, device=device)
    positions = torch.zeros(len(new), width, dtype=torch.int64, device=device)
    for row, (one, n, tokens) in enumerate(zip(conversations, known, new, strict=True)):
        seen[row, past - n : past + len(tokens)] = 1
        positions[row] = torch.arange(one.next, one.next + width, device=device)
    hidden = read(policy, ids, positions, attention_mask=seen, cache=cache)
    last = torch.tensor([len(row) - 1 for row in new], device=device)
    # Move the padding of each row to the left, and drop columns that are padding in all rows.
    order = seen.argsort(dim=1, stable=True)[:, -int(seen.sum(1).max()) :]
    packed = cache_of(
        [x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])) for x in layer]
        for layer in layers_of(cache)
    )
    rows = Rows(packed, seen.gather(1, order), positions.gather(1, last[:, None]))
    return hidden[torch.arange(len(new), device=device), last], rows


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return rows of integers as a tensor [B, L], padded with 0 on the left."""
    width = max(map(len, rows))
    return integers([x for row in rows for x in (*[0] * (width - len(row)), *row)], device).view(len(rows), width)


def _seen(prompts: Sequence[ModelInput], device: torch.device) -> Tensor:
    """Return the mask [B, L] int64 of left-padded prompts: 1 on tokens, 0 on padding."""
    return _left_padded([[1] * len(prompt) for prompt in prompts], device)


def _last(positions: Tensor) -> Tensor:
    """Return the largest position component [N] of each of N tokens; the next text token comes after that position."""
    return positions if positions.dim() == 1 else positions.amax(0)
