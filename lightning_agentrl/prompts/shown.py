"""What a model reads, as a person reads it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from lightning_agentrl.types import ImageChunk, ModelInput


def shown(tokenizer: PreTrainedTokenizerBase, read: ModelInput) -> str:
    """Return a model input as text, special tokens included; an image as a few words in brackets."""
    parts = []
    for chunk in read.chunks:
        if isinstance(chunk, ImageChunk):
            parts.append(f"[image of {chunk.tokens} tokens]")
        else:
            parts.append(str(tokenizer.decode(list(chunk.ids), clean_up_tokenization_spaces=False)))
    return "".join(parts)
