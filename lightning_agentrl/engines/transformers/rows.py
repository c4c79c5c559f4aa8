"""Rows of tokens side by side, with the keys and values that were computed of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache

from lightning_agentrl.models.language_model import LanguageModel, read_tokens
from lightning_agentrl.models.vision import PackedImages, text_decoder


@dataclass
class Rows:
    """B rows, left-padded and masked, so that they end in the same column."""

    cache: DynamicCache
    seen: Tensor  # [B, L] int64, 1 on tokens
    positions: Tensor  # [B, 1] int64, of the last tokens, which are text

    def read_on(self, policy: LanguageModel, tokens_B: Sequence[int]) -> Tensor:
        """Read one more token of each row and return hidden states [B, H]."""
        self.seen = torch.cat([self.seen, self.seen.new_ones(len(tokens_B), 1)], 1)
        self.positions = self.positions + 1
        return read(
            policy,
            torch.tensor(tokens_B, device=self.seen.device)[:, None],
            self.positions,
            attention_mask=self.seen,
            cache=self.cache,
        )[:, -1]

    @property
    def layers(self) -> list[Any]:
        return cast(Any, self.cache).layers

    def packed(self) -> Rows:
        """Close the gaps between the tokens of a row, so that each ends with all of them, and return the rows."""
        order = self.seen.argsort(dim=1, stable=True)  # columns without a token first
        width = int(self.seen.sum(1).max())
        order = order[:, -width:]
        self.seen = self.seen.gather(1, order)
        for layer in self.layers:
            index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys = layer.keys.gather(2, index)
            layer.values = layer.values.gather(2, index[..., :1].expand(-1, -1, -1, layer.values.shape[3]))
        return self

    def kept(self, rows: Sequence[int]) -> Rows:
        """Return some of the rows without the columns that only others need. All layers must hold whole rows."""
        places = torch.tensor(rows, device=self.seen.device)
        first = self.seen.shape[1] - int(self.seen[places].sum(1).max())
        cache = DynamicCache()
        for index, layer in enumerate(self.layers):
            cache.update(layer.keys[places, :, first:], layer.values[places, :, first:], index)
        return Rows(cache, self.seen[places, first:], self.positions[places])

    def join(self, others: Rows) -> None:
        """Take rows in, behind these. The caches of all layers must hold whole rows."""
        width = max(self.seen.shape[1], others.seen.shape[1])
        self.positions = torch.cat([self.positions, others.positions])
        self.seen = torch.cat([pad(rows.seen, (width - rows.seen.shape[1], 0)) for rows in (self, others)])
        for own, new in zip(self.layers, others.layers, strict=True):
            own.keys, own.values = (
                torch.cat([pad(x, (0, 0, width - x.shape[2], 0)) for x in pair])
                for pair in ((own.keys, new.keys), (own.values, new.values))
            )


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
    """Return what a decoder's forward pass calls its cache; transformers has renamed it."""
    return "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"
