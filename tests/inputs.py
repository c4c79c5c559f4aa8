"""Short ways to write what a model reads."""

from __future__ import annotations

import random
from collections.abc import Sequence

from lightning_agentrl.types import ImageChunk, ModelInput, Row
from tests.tiny import VOCABULARY

PLACEHOLDER = 7


def text(*ids: int) -> ModelInput:
    return ModelInput.of_ids(ids)


def image(name: str, tokens: int = 4) -> ModelInput:
    """All images have the same placeholder, so that only their names tell images of equal length apart."""
    return ModelInput((ImageChunk(name, PLACEHOLDER, tokens),))


def text_row(ids: Sequence[int], reads: tuple[int, ...]) -> Row:
    return Row(ModelInput.of_ids(ids), reads)


def random_ids(seed: int, count: int) -> tuple[int, ...]:
    """Return ids of the tiny models that are no special tokens."""
    return tuple(random.Random(seed).choices(range(3, VOCABULARY), k=count))
