"""Prefill of prompts: hidden states of their last tokens, and the rows to which their replies are added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_agentrl.engines.transformers.rows import Rows, read
from lightning_agentrl.models.images_in_rows import find_tokens
from lightning_agentrl.models.integers import integers
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.last_layer import UNIQUE_POSITIONS
from lightning_agentrl.models.prefix_tree import Keys, common_prefix_length, lay_out
from lightning_agentrl.models.tree_attention import no_mask
from lightning_agentrl.types.model_input import ModelInput, check_text_only

LEAST_PREFIX = 8  # tokens; reading fewer again costs less than keeping them apart

RowsOf = Callable[[Sequence[int]], Rows]  # makes the rows of the prompts of these numbers, once it is clear who goes on


def check_prompt(policy: LanguageModel, prompt: ModelInput) -> None:
    """Refuse a prompt that the policy cannot read.

    Raises:
        ValueError: it has an image, and the policy reads text only or other images.
    """
    if policy.image_reader is None:
        check_text_only([prompt], "TransformersEngine")
    else:
        for image in prompt.images:
            policy.image_reader.grid(image)


class TreePrefill:
    """Prefill as a prefix tree: a common prefix is computed once, that of all prompts once for many batches.

    Prefixes are compared by keys, so prompts with different images share nothing behind the first of them.
    """

    whole_rows: ClassVar[bool] = True  # are in the cache, so rows can join and leave

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._prefix: Keys = ()
        self._next = 0  # position behind the prefix; an image takes fewer than it has tokens
        self._prefix_cache = DynamicCache()

    def forget(self) -> None:
        """Drop the kept prefix, as the weights have changed."""
        # The cache holds whole rows, even if layers have windows: a tree is not a row.
        self._prefix, self._next, self._prefix_cache = (), 0, DynamicCache()

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, RowsOf]:
        """Read prompts.

        Args:
            prompts: to be read.
            beside: those of the replies that are being sampled meanwhile, whose prefix is worth keeping too.

        Returns:
            Hidden states [B, H] of their last tokens, and what makes the rows of some of them.
        """
        self.keep_common_prefix([*prompts, *beside])
        past, device = len(self._prefix), self.policy.lm.device
        layout = lay_out([prompt.keys[past:] for prompt in prompts], device)
        ends = [layout.find(k, (len(prompt) - past - 1,))[0] for k, prompt in enumerate(prompts)]
        cache = _branched(self._prefix_cache)  # since the model appends to it
        positions, images = self._next + layout.tree.positions, (prompt.images for prompt in prompts)
        tokens = find_tokens(layout.keys, positions, layout.tree.ends, images, self.policy.image_reader)
        hidden_N = read(
            self.policy,
            tokens.ids[None],
            tokens.positions[..., None, :],
            tokens.images,
            attention_mask=no_mask(device),
            cache=cache,
            tree=layout.tree,
            **{UNIQUE_POSITIONS: integers(sorted(set(ends)), device)},
        )[0]
        last_N1 = _last(tokens.positions)[:, None]

        def rows_of(numbers: Sequence[int]) -> Rows:
            prefix = [*range(past)]
            columns_BL = _left_padded([prefix + [past + p for p in layout.places(k)] for k in numbers], device)
            rows = DynamicCache()
            for index, layer in enumerate(cache.layers):
                keys, values = cast(Any, layer).keys[0], cast(Any, layer).values[0]
                rows.update(keys[:, columns_BL].transpose(0, 1), values[:, columns_BL].transpose(0, 1), index)
            return Rows(rows, _seen([prompts[k] for k in numbers], device), last_N1[[ends[k] for k in numbers]])

        return hidden_N[ends], rows_of

    def keep_common_prefix(self, prompts: Sequence[ModelInput]) -> None:
        """Keep the cached prefix if all prompts begin with it and it is not much too short; else compute theirs.

        At least one token of each prompt is left out, since its hidden state is needed. A few tokens are not kept. On a
        GPU none are: FlexAttention reads no tree behind a past, and dense attention has a mask of all pairs of tokens.
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


def _branched(cache: DynamicCache) -> DynamicCache:
    """Return a cache that begins with what is in another one, and grows apart from it."""
    branched = DynamicCache()
    for index, layer in enumerate(cast(Any, cache).layers):
        branched.update(layer.keys, layer.values, index)
    return branched


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return [B, L]: rows of integers that end in the same column, 0 before each."""
    width = max(map(len, rows))
    return integers([x for row in rows for x in (*[0] * (width - len(row)), *row)], device).view(len(rows), width)


def _seen(prompts: Sequence[ModelInput], device: torch.device) -> Tensor:
    """Return int64 [B, L]: 1 on the tokens of left-padded prompts."""
    return _left_padded([[1] * len(prompt) for prompt in prompts], device)


def _last(positions: Tensor) -> Tensor:
    """Return [N]: for each token the position that the next text token follows."""
    return positions if positions.dim() == 1 else positions.amax(0)


class PaddedPrefill:
    """Prefill of padded prompts side by side, for models whose layers cannot read a tree.

    What such layers keep of the past may be anything, so no row joins or leaves before all are done.
    """

    whole_rows: ClassVar[bool] = False

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy

    def forget(self) -> None:
        """Do nothing: no prefix is kept."""

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, RowsOf]:
        """Read prompts; see :class:`TreePrefill`. Rows cannot leave, so they are those of all prompts in any case."""
        device, cache = self.policy.lm.device, DynamicCache(config=self.policy.lm.config)
        seen = _seen(prompts, device)
        width = seen.shape[1]
        keys = [key for prompt in prompts for key in (*[0] * (width - len(prompt)), *prompt.keys)]
        positions = (seen.cumsum(1) - 1).clamp_min(0)
        ends = torch.arange(1, len(prompts) + 1, device=device).repeat_interleave(width) * width
        images, reader = (prompt.images for prompt in prompts), self.policy.image_reader
        tokens = find_tokens(keys, positions.flatten(), ends, images, reader)
        ids, positions = tokens.ids.view(seen.shape), tokens.positions.unflatten(-1, seen.shape)
        hidden = read(self.policy, ids, positions, tokens.images, attention_mask=seen, cache=cache)
        rows = Rows(cache, seen, _last(tokens.positions).view(seen.shape)[:, -1:])
        return hidden[:, -1], lambda numbers: rows
