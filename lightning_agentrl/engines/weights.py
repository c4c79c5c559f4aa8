"""Weights of a policy for engines: under their names in the model's files, merged with adapters, and as copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.kernels import linear_layers, round_linear_layers
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.lora import adapted_layers, merged_weight
from lightning_agentrl.models.sharding import gathered, units

NOISE = 0.1  # standard deviation of the noise that replaces weights that are all 0


def named_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight and persistent buffer by its name in memory; a tied weight appears under each of its names.

    An output head tied to the embedding is included, since an engine may keep a packed copy of the head.
    """
    for name, weight in lm.named_parameters(remove_duplicate=False):
        yield name, weight.detach()
    for path, module in lm.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def merged_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield :func:`named_weights` for engines without adapters: adapters are merged, and all weights have one dtype."""
    adapted = adapted_layers(lm)
    for name, weight in named_weights(lm):
        layer, _, own = name.partition(".base_layer.")
        if layer in adapted:
            yield f"{layer}.{own}", (merged_weight(adapted[layer]) if own == "weight" else weight).to(lm.dtype)
        elif not adapted or ".lora_" not in name:
            yield name, weight.to(lm.dtype) if adapted and weight.is_floating_point() else weight


def named_as_in_files(lm: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return weights by their names in the model's files, which other engines use.

    These names differ if transformers stores several tensors of a file as one, such as the experts of a layer; the
    returned parts are then views.

    Args:
        lm: model that owns the weights.
        weights: weights of whole layers, by their names in memory.
    """
    return list(revert_weight_conversion(lm, dict(weights)).items())


@contextmanager
def weights_by_layer(policy: LanguageModel) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield an iterator over all weights by their names in files, layer by layer if the policy is sharded.

    A sharded layer is gathered, copied and resharded, since the consumer may keep its tensors. Weights outside layers
    stay gathered inside the context. All ranks must enter, iterate and leave together.
    """
    with gathered(policy, layers=False):
        yield _layer_after_layer(policy)


def _layer_after_layer(policy: LanguageModel) -> Iterator[tuple[str, Tensor]]:
    lm = policy.lm
    names = {id(module): f"{name}." for name, module in lm.named_modules()}
    in_layers = list[str]()
    for layer in units(policy)[1:]:
        start = names[id(layer)]
        layer.unshard()
        try:
            part = [(start + name, weight.clone()) for name, weight in named_weights(cast(nn.Module, layer))]
        finally:
            layer.reshard()
        in_layers.append(start)
        yield from named_as_in_files(lm, part)
    rest = ((name, weight) for name, weight in named_weights(lm) if not name.startswith(tuple(in_layers)))
    yield from named_as_in_files(lm, rest)


def frozen_copy(policy: LanguageModel, rounds_to: torch.dtype | None = None) -> LanguageModel:
    """Return a copy of a policy with its own copy of the trained weights; frozen weights are shared.

    Args:
        policy: policy in training.
        rounds_to: dtype of the autocast in which the copy runs; None means no autocast.

    Raises:
        ValueError: the policy is sharded.
    """
    if units(policy):
        raise ConfigError(
            "TransformersEngine cannot copy a policy that is sharded over devices, which sampling during training "
            "needs (data.init_args.max_staleness above 0); use VLLMEngine (key data.init_args.engine), or 0"
        )
    shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
    # `deepcopy` does not copy objects in the memo.
    copied = copy.deepcopy(policy, dict(shared)).requires_grad_(False).eval()
    if rounds_to is not None:
        round_linear_layers(copied.lm, rounds_to, but=shared.values())
    return copied


def copied_bytes(policy: LanguageModel, rounds_to: torch.dtype | None = None) -> int:
    """Return the size, in bytes, of the weights that :func:`frozen_copy` copies."""
    sizes = {id(weight): weight.nbytes for weight in policy.parameters() if weight.requires_grad}
    if rounds_to is not None:
        rounded = [weight for layer in linear_layers(policy.lm) for weight in layer.parameters(recurse=False)]
        sizes |= {id(weight): weight.numel() * rounds_to.itemsize for weight in rounded if weight.requires_grad}
    return sum(sizes.values())


@torch.no_grad()
def copy_weights(policy: LanguageModel, to: LanguageModel) -> None:
    """Update the weights of a :func:`frozen_copy`."""
    for own, trained in zip(to.parameters(), policy.parameters(), strict=True):
        if own is not trained:
            own.copy_(trained)


@contextmanager
def moved(policy: nn.Module, number: int, chosen: Callable[[str], bool] = lambda name: True) -> Iterator[None]:
    """Change every trained weight strongly inside the context, and restore the weights bit for bit at the end.

    The signs of every n-th column (n from 3 to 7) are flipped, which takes no memory and can be undone exactly. Weights
    that follow each other flip different columns, since the flips of a norm and of the next layer would cancel. Weights
    that are all 0, such as half of a new adapter's, get noise.

    Args:
        policy: policy to change; each rank changes its shard.
        number: seed that selects the columns; equal seeds give equal changes, consecutive seeds different changes.
        chosen: predicate on a weight's name that selects the weights to change.
    """
    zeros = dict[str, Tensor]()
    _move(policy, number, chosen, zeros)
    try:
        yield
    finally:
        _move(policy, number, chosen, zeros)


@torch.no_grad()
def _move(policy: nn.Module, number: int, chosen: Callable[[str], bool], zeros: dict[str, Tensor]) -> None:
    """Change weights, or undo the change; ``zeros`` holds the weights that were all 0."""
    trained = [(name, weight) for name, weight in policy.named_parameters() if weight.requires_grad]
    for place, (name, weight) in enumerate(trained):
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        if not own.numel() or not chosen(name):
            continue
        if name in zeros:
            own.copy_(zeros.pop(name))
        elif not own.any():
            zeros[name] = own.clone()
            random = torch.Generator().manual_seed(1000 * place + number)  # the noise does not depend on `chosen`
            own.copy_(NOISE * torch.randn(own.shape, generator=random))
        else:
            own[None][..., :: 3 + (place + number) % 5].neg_()
