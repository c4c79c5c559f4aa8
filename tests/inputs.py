"""Short ways to write what a model reads."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_agentrl.types import ImageChunk, ModelInput, Row

PLACEHOLDER = 7


def text(*ids: int) -> ModelInput:
    return ModelInput.of_ids(ids)


def image(name: str, tokens: int = 4) -> ModelInput:
    """All images have the same placeholder, so that only their names tell images of equal length apart."""
    return ModelInput((ImageChunk(name, PLACEHOLDER, tokens),))


def text_row(ids: Sequence[int], reads: tuple[int, ...]) -> Row:
    return Row(ModelInput.of_ids(ids), reads)
