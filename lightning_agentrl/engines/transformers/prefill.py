"""Prefill of prompts: hidden states of their last tokens, and the rows to which their replies are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from lightning_agentrl.engines.transformers.rows import Rows, read
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.last_layer import UNIQUE_POSITIONS
from lightning_agentrl.models.prefix_tree import Keys, common_prefix_length, lay_out
from lightning_agentrl.models.tree_attention import no_mask
from lightning_agentrl.types.model_input import ModelInput


class TreePrefill:
    """Prefill as a prefix tree: a common prefix is computed once, that of all prompts once for many batches.

    Prefixes are compared by keys. What is read is ids alone, so the engine refuses prompts with images before.
    """

    whole_rows: ClassVar[bool] = True  # are in the cache, so rows can join and leave

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._prefix: Keys = ()
        self._prefix_cache = DynamicCache()

    def forget(self) -> None:
        """Drop the kept prefix, as the weights have changed."""
        self._prefix, self._prefix_cache = (), DynamicCache()

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, Rows]:
        """Read prompts.

        Args:
            prompts: to be read.
            beside: those of the replies that are being sampled meanwhile, whose prefix is worth keeping too.

        Returns:
            Hidden states [B, H] of their last tokens, and the rows.
        """
        self.keep_common_prefix([*prompts, *beside])
        past, device = len(self._prefix), self.policy.lm.device
        layout = lay_out([prompt.keys[past:] for prompt in prompts], device)  # of text, so these are the ids
        ends = [layout.places(k)[-1] for k in range(len(prompts))]
        cache = DynamicCache()  # of whole rows, even if layers have windows: a tree is not a row
        for index, layer in enumerate(self._prefix_cache.layers):  # copied, since the model appends to it
            cache.update(cast(Any, layer).keys, cast(Any, layer).values, index)
        hidden_N = read(
            self.policy,
            input_ids=torch.tensor([layout.keys], device=device),
            attention_mask=no_mask(device),
            position_ids=past + layout.tree.positions[None],
            past_key_values=cache,
            tree=layout.tree,
            **{UNIQUE_POSITIONS: torch.tensor(sorted(set(ends)), device=device)},
        )[0]
        places = [[*range(past), *(past + p for p in layout.places(k))] for k in range(len(prompts))]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = int(lengths.max())
        columns_BL = torch.tensor([[0] * (width - len(p)) + p for p in places], device=device)
        rows = DynamicCache()
        for index, layer in enumerate(cache.layers):
            keys, values = cast(Any, layer).keys[0], cast(Any, layer).values[0]
            rows.update(keys[:, columns_BL].transpose(0, 1), values[:, columns_BL].transpose(0, 1), index)
        seen = torch.arange(width, device=device) >= width - lengths[:, None]
        return hidden_N[ends], Rows(rows, seen.to(torch.int64), lengths[:, None] - 1)

    def keep_common_prefix(self, prompts: Sequence[ModelInput]) -> None:
        """Keep the cached prefix if all prompts begin with it and it is not much too short; else compute theirs.

        At least one token of each prompt is left out, since its hidden state is needed.
        """
        rows = [prompt.keys for prompt in prompts]
        common = min(common_prefix_length(rows), min(map(len, rows)) - 1)
        kept = self._prefix
        if kept and common >= len(kept) and rows[0][: len(kept)] == kept and common <= 2 * len(kept):
            return
        self.forget()
        if common:
            self._prefix = rows[0][:common]
            ids = torch.tensor([prompts[0].ids[:common]], device=self.policy.lm.device)
            read(self.policy, input_ids=ids, past_key_values=self._prefix_cache)


class PaddedPrefill:
    """Prefill of padded prompts side by side, for models whose layers cannot read a tree.

    What such layers keep of the past may be anything, so no row joins or leaves before all are done.
    """

    whole_rows: ClassVar[bool] = False

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy

    def forget(self) -> None:
        """Do nothing: no prefix is kept."""

    def __call__(self, prompts: Sequence[ModelInput], beside: Sequence[ModelInput] = ()) -> tuple[Tensor, Rows]:
        """Read prompts; see :class:`TreePrefill`."""
        device, cache = self.policy.lm.device, DynamicCache(config=self.policy.lm.config)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = int(lengths.max())
        columns = torch.arange(width, device=device)
        seen = (columns >= width - lengths[:, None]).to(torch.int64)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt.ids) for prompt in prompts], device=device)
        positions = (columns - (width - lengths[:, None])).clamp_min(0)
        hidden = read(self.policy, input_ids=ids, attention_mask=seen, position_ids=positions, past_key_values=cache)
        return hidden[:, -1], Rows(cache, seen, positions[:, -1:])
