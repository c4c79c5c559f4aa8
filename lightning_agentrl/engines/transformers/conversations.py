"""Keys and values of each player's last conversation, so that a prompt that goes on from it costs what is new."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from lightning_agentrl.engines.base import SamplingRequest
from lightning_agentrl.engines.transformers.rows import Rows, read
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.prefix_tree import Keys
from lightning_agentrl.types.model_input import ModelInput

LEAST_GAIN = 32  # tokens that need not be read again; fewer are read with the other prompts


@dataclass(frozen=True)
class Conversation:
    """What is kept of one: the tokens, and keys and values [heads, L, D] of each layer."""

    keys: Keys
    layers: Sequence[tuple[Tensor, Tensor]]
    next: int  # position behind the last token; an image takes fewer than it has tokens

    def goes_on_in(self, prompt: ModelInput) -> bool:
        """Return whether a prompt is all of it and more, and what is new has no image, which would have to be seen."""
        known = len(self.keys)
        return len(prompt) > known and prompt.keys[:known] == self.keys and min(prompt.keys[known:]) >= 0


class Conversations:
    """The last conversation of each player, by the number of its requests, until the weights change.

    Args:
        most_tokens: of all together; the oldest are dropped first.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._kept: OrderedDict[int, Conversation] = OrderedDict()

    def forget(self) -> None:
        """Drop all, as the weights have changed."""
        self._kept.clear()

    def keep(self, request: SamplingRequest, ids: Sequence[int], rows: Rows, row: int) -> None:
        """Keep the row of a reply that is done; its last token has not been read."""
        if not request.number:
            return
        keys = (*request.prompt.keys, *ids[:-1])
        layers = [(layer.keys[row, :, -len(keys) :], layer.values[row, :, -len(keys) :]) for layer in rows.layers]
        kept = Conversation(keys, [(k.clone(), v.clone()) for k, v in layers], int(rows.positions[row]) + 1)
        self._kept.pop(request.number[0], None)
        self._kept[request.number[0]] = kept
        while len(self._kept) > 1 and sum(len(one.keys) for one in self._kept.values()) > self.most_tokens:
            self._kept.popitem(last=False)

    def find(self, request: SamplingRequest, shared: int) -> Conversation | None:
        """Return what a request goes on from, if it saves more than the tokens that all prompts share."""
        kept = self._kept.get(request.number[0]) if request.number else None
        if kept is None or len(kept.keys) < shared + LEAST_GAIN:
            return None
        return kept if kept.goes_on_in(request.prompt) else None


def read_on(
    policy: LanguageModel, prompts: Sequence[ModelInput], conversations: Sequence[Conversation]
) -> tuple[Tensor, Rows]:
    """Read what prompts add to their conversations, side by side.

    Returns:
        Hidden states [B, H] of their last tokens, and their rows.
    """
    device = policy.lm.device
    known = [len(one.keys) for one in conversations]
    new = [prompt.ids[n:] for n, prompt in zip(known, prompts, strict=True)]
    past, width = max(known), max(map(len, new))
    cache = DynamicCache()
    for index in range(len(conversations[0].layers)):
        pairs = zip(*(one.layers[index] for one in conversations), strict=True)
        keys, values = (
            torch.stack([pad(x, (0, 0, past - n, 0)) for x, n in zip(side, known, strict=True)]) for side in pairs
        )
        cache.update(keys, values, index)
    # Behind the new tokens of a row are blanks, which none of them sees; between old and new ones there are none, since
    # layers with a window count columns.
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in new], device=device)
    seen = torch.zeros(len(new), past + width, dtype=torch.int64, device=device)
    positions = torch.zeros(len(new), width, dtype=torch.int64, device=device)
    for row, (one, n, tokens) in enumerate(zip(conversations, known, new, strict=True)):
        seen[row, past - n : past + len(tokens)] = 1
        positions[row] = torch.arange(one.next, one.next + width, device=device)
    hidden = read(policy, ids, positions, attention_mask=seen, cache=cache)
    last = torch.tensor([len(row) - 1 for row in new], device=device)
    rows = Rows(cache, seen, positions.gather(1, last[:, None]))
    return hidden[torch.arange(len(new), device=device), last], rows.packed()
