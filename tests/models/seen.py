"""Rows of text and images for tests, and what a model's own forward pass makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.vision import FamilyReader
from lightning_agentrl.types import ModelInput, Row

OTHERS = ("qwen2_5_vl", "idefics3", "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
VISION_FAMILIES: list[Any] = [  # as parameters of a test: one of each kind, and the others, which are slow
    *("qwen3_vl", "smolvlm", "gemma3"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
]


def picture(seed: int, height: int = 48, width: int = 48) -> np.ndarray:
    """Coarse coloured blocks, so that each token of an image is different."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return np.kron(small, np.ones((8, 8, 1), dtype=np.uint8))


def text(*ids: int) -> ModelInput:
    return ModelInput.of_ids([20 + i for i in ids])


def reader_of(policy: LanguageModel) -> FamilyReader:
    assert policy.image_reader is not None
    return policy.image_reader


def rows_with_images(reader: FamilyReader) -> list[Row]:
    """Return rows of every kind: text alone; a shared image; others of equal or another size; images in later turns."""
    a, b, c = (reader.read(picture(seed)) for seed in range(3))  # of 3 x 3 tokens
    wide = reader.read(picture(3, 32, 96))  # 2 x 6 tokens, where images have different sizes
    start = text(1, 2, 3)
    first = start + a + text(4, 5)
    read = [
        text(1, 2, 3, 4, 5, 6),
        first + text(6, 7),
        first + text(6, 8, 9),
        first + text(6, 8) + b + text(10, 11),  # an image in a later turn
        first + text(6, 8) + c + text(10, 11),  # another one of equal ids in its place
        first + text(6, 8) + a + text(10, 12),  # the same one again
        start + b + text(4, 5, 6, 7),  # equal ids, another image
        start + wide + text(4, 5, 6),
        start + wide + text(4) + c + text(5) + a + text(6, 7),
        text(30, 31) + c + text(32),  # nothing in common
    ]
    rows = []
    for one in read:
        last = len(one) - 1
        is_text = [token != reader.placeholder for token in one.ids]
        rows.append(Row(one, tuple(p for p in range(last + 1) if is_text[p] and (p % 2 or p > last - 3))))
    return rows


def own_hidden(lm: PreTrainedModel, reader: FamilyReader, row: Row) -> Tensor:
    """Return hidden states [R, H] at the logit positions, as the model computes them for one row by itself."""
    ids = torch.tensor([row.ids])
    images: dict[str, Any] = {}
    if row.input.images:
        images = dict(reader.patches(row.input.images))
    if reader.rotary:
        images["mm_token_type_ids"] = (ids == reader.placeholder).int()
    elif reader.bidirectional:
        images["token_type_ids"] = (ids == reader.placeholder).int()
    elif images:
        images["pixel_values"] = images["pixel_values"].transpose(0, 1)  # one row of several images
    hidden = lm.base_model(input_ids=ids, use_cache=False, **images).last_hidden_state
    return hidden[0, list(row.logit_positions)]
