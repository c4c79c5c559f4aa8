"""The parts of a model: the decoder of its text, and what reads images."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from lightning_agentrl.models.image_reader import READERS


def text_decoder(lm: PreTrainedModel) -> PreTrainedModel:
    """Return what computes hidden states of tokens; of a model for text alone, all but its output head."""
    return cast(PreTrainedModel, cast(Any, lm.base_model).get_decoder() if _sees(lm) else lm.base_model)


def tower(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that make features of images, with the projection to the size of the text model, if any."""
    text = text_decoder(lm)
    return {name: part for name, part in lm.base_model.named_children() if _sees(lm) and part is not text}


def trains_tower(lm: PreTrainedModel) -> bool:
    return any(weight.requires_grad for part in tower(lm).values() for weight in part.parameters())


def _sees(lm: PreTrainedModel) -> bool:
    return lm.config.model_type in READERS
