"""FSDP2: each process holds a shard of every weight, its gradient and its optimizer state.

Units are gathered one at a time: each decoder layer is a unit, and the rest of the model (embedding, last norm, output
head) is the root unit. Tied weights are thus in one unit, and log-probs, entropy and Σπ² are computed from logits of
the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lightning_agentrl.models.critic import ValueHead
from lightning_agentrl.models.loading import decoder_layers


def shard(model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
    """Shard a policy or critic in place; all ranks must call this function with the same weights.

    Args:
        model: a LanguageModel or critic that is not sharded yet.
        mesh: one-dimensional mesh of the ranks over which the model is sharded.
        compute_dtype: dtype of gathered weights; shards keep their dtype, and gradients are summed in float32. None
            means that everything is computed in the dtype of the weights.
    """
    exact = MixedPrecisionPolicy()
    policy = exact if compute_dtype is None else MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32)
    layers = decoder_layers(model)
    for module in list(model.modules()):
        if any(module is layer for layer in layers):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        elif isinstance(module, ValueHead):
            fully_shard(module, mesh=mesh, mp_policy=exact)  # values need more precision than bfloat16
    # The root stays gathered from `hidden` to its backward pass, since `token_scores` reads the output head in between.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if hasattr(model, "hidden"):
        register_fsdp_forward_method(model, "hidden")
    cast(Any, model)._get_fsdp_state()._lazy_init()  # make the model the root even if another unit runs first


def units(model: nn.Module) -> list[FSDPModule]:
    """Return the sharded units of a model, its root first; an empty list if the model is not sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def release(model: nn.Module) -> None:
    """Free gathered weights, so that parameters are shards again."""
    for unit in units(model):
        unit.reshard()


@contextmanager
def gathered(model: nn.Module, layers: bool = True) -> Iterator[None]:
    """Gather all weights on every rank in the compute dtype, so that forward passes need no communication.

    All ranks must enter and leave together. Inside, do not change weights or compute gradients.

    Args:
        model: a sharded model; other models are left unchanged.
        layers: True gathers the root unit and the decoder layers; False gathers the root unit only.
    """
    own = units(model) if layers else units(model)[:1]
    for unit in own:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in own:
            unit.set_reshard_after_forward(unit is not own[0], recurse=False)
            unit.reshard()
