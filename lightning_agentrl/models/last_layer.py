"""The last layer's feed-forward network at the logit positions only, since its other outputs are never used.

Attention needs every position as key and value; what follows it in the last layer treats each position separately.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_agentrl.models.parts import text_decoder

UNIQUE_POSITIONS = "unique_positions"  # keyword of a model's forward pass: [U] of its one row


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of the language model in a module, each a unit of compilation and sharding.

    Those of a tower are none: a micro-batch without images leaves them out.
    """
    lm = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    modules = [] if lm is None else text_decoder(lm).modules()
    return [module for module in modules if type(module).__name__ in names]


def skip_unread(lm: PreTrainedModel) -> None:
    """Make a model's forward pass accept ``unique_positions``; last hidden states elsewhere are then incomplete.

    This adds hooks within the last layer, which also run when its activations are recomputed; those of the layer itself
    would not in every version of transformers. There are none if no attention or no network is found.
    """
    layers = decoder_layers(lm)
    parts = dict(layers[-1].named_children()) if layers else {}
    network = parts.get("mlp")
    attention = next((part for part in parts.values() if "attention" in type(part).__name__.lower()), None)
    if network is not None and attention is not None:
        attention.register_forward_pre_hook(partial(_hand_places, network), with_kwargs=True)
        network.register_forward_pre_hook(_take)
        network.register_forward_hook(_put_back)


def _hand_places(network: Any, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    network.unique_positions = kwargs.get(UNIQUE_POSITIONS)  # a layer gives its attention all that it was given


def _take(network: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if network.unique_positions is None:
        return None
    (hidden_1NH,) = args
    network.all_hidden = hidden_1NH
    return (hidden_1NH[:, network.unique_positions],)


def _put_back(network: Any, args: tuple[Any, ...], out_1UH: Tensor) -> Tensor:
    if network.unique_positions is None:
        return out_1UH
    places, everywhere = network.unique_positions, network.all_hidden
    network.unique_positions = network.all_hidden = None
    return torch.zeros_like(everywhere, dtype=out_1UH.dtype).index_copy(1, places, out_1UH)
