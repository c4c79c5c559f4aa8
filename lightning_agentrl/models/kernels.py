"""Faster layers and number formats: compiled or fused kernels, checkpointing, autocast's rounding, bfloat16 support."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_agentrl.models.families import SHARING, why_unshared
from lightning_agentrl.models.loading import decoder_layers

Kernels = Literal["auto", "torch", "compiled", "liger"]

KEY = "model.init_args.compute.kernels"


def automatic_kernels(on_gpu: bool, sharded: bool, samples: bool) -> Kernels:
    """Return what ``auto`` means on this device: ``torch``, or ``auto`` for compiled layers of tested families.

    Compiled layers were measured where a GPU scores and trains (docs/results/gpu.md), not where it also samples.

    Args:
        on_gpu: the models are on a GPU.
        sharded: their weights are sharded.
        samples: an engine samples with the same layers.
    """
    return "auto" if on_gpu and not sharded and not samples else "torch"


def check_kernels(kernels: Kernels, on_gpu: bool, sharded: bool) -> None:
    """Refuse kernels that this machine cannot run, before any weights are read.

    Raises:
        ValueError: Liger kernels without a GPU, or other kernels than torch's with sharded weights.
        ImportError: Liger kernels without their package.
    """
    if kernels in ("compiled", "liger") and sharded:
        raise ValueError(f"{kernels} kernels were not tested with sharded weights; use 'torch' (key {KEY})")
    if kernels != "liger":
        return
    if not on_gpu:
        raise ValueError(f"Liger kernels need a GPU; use 'torch' or 'compiled' (key {KEY})")
    if importlib.util.find_spec("liger_kernel") is None:
        raise ImportError(
            f'Liger kernels need the package liger-kernel: pip install "lightning-agentrl[liger]" (key {KEY})'
        )


def use_kernels(lm: PreTrainedModel, kernels: Kernels) -> None:
    """Replace layers of a model in place; results stay the same up to rounding.

    ``auto`` compiles the families whose text rows share prefixes, and leaves others as they are.
    """
    tested = lm.config.model_type in SHARING and not why_unshared(lm.config)
    if kernels == "compiled" or (kernels == "auto" and tested):
        layers = decoder_layers(lm)
        if not layers and kernels == "compiled":
            raise ValueError(f"the layers of {type(lm).__name__} are not known, so they cannot be compiled (key {KEY})")
        for layer in layers:
            layer.compile(dynamic=True)
    elif kernels == "liger":  # the loss is ours, as are logits at chosen positions only
        from transformers.integrations.liger import apply_liger_kernel  # imports peft where that is installed

        apply_liger_kernel(lm, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def checkpoint_activations(lm: PreTrainedModel) -> None:
    """Recompute activations in the backward pass, layer by layer, instead of storing them.

    Raises:
        ValueError: the model has no layers that can be recomputed.
    """
    kwargs, enable = {"use_reentrant": False}, getattr(lm, "activation_checkpointing_enable", None)
    if enable is None:  # an older transformers; 6.0 has the new name alone
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        enable(activation_checkpointing_kwargs=kwargs)


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
    """Yield the linear layers whose weights autocast rounds at every use."""
    embedding = lm.get_input_embeddings().weight
    for module in lm.modules():
        if isinstance(module, nn.Linear) and module.weight is not embedding:
            yield module


NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}  # as x86 and ARM call it
CPUINFO = Path("/proc/cpuinfo")


def lacks_bfloat16(cpuinfo: str) -> bool:
    """Return whether no processor in a text like that of ``/proc/cpuinfo`` says that it multiplies bfloat16."""
    lists = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return bool(lists) and not any(NATIVE.intersection(flags) for flags in lists)


def slow_in_bfloat16(precision: str) -> str | None:
    """Return a sentence if a precision makes a run on this CPU slower than float32, else None."""
    if not precision.startswith("bf16") or not CPUINFO.exists() or not lacks_bfloat16(CPUINFO.read_text()):
        return None
    return (
        f"this processor does not multiply bfloat16 itself, so trainer.precision {precision} is several times as slow "
        "here as 32-true"
    )
