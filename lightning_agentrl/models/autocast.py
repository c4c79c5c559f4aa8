"""Frozen weights that are kept as autocast would round them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel


def round_linear_layers(lm: PreTrainedModel, dtype: torch.dtype, but: Collection[nn.Parameter] = ()) -> None:
    """Store the frozen weights of linear layers in ``dtype``, for models that run under autocast to ``dtype``.

    Autocast caches rounded copies of trained weights only, and would round these in each forward pass. Results are
    equal to the last bit, faster and in half the memory. An output head tied to the embedding is left unchanged.

    Args:
        lm: the model.
        dtype: of autocast.
        but: weights that stay as they are, since another model has them too.
    """
    kept = {id(weight) for weight in but}
    for layer in linear_layers(lm):
        if id(layer.weight) not in kept:
            layer.to(dtype)


def linear_layers(lm: PreTrainedModel) -> Iterator[nn.Linear]:
    """Yield the linear layers whose weights autocast rounds wherever they are used."""
    embedding = lm.get_input_embeddings().weight
    for module in lm.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding:
            yield module
