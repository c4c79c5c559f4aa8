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
    """Resolve ``auto`` for this device: ``auto`` (compiled layers for tested families) or ``torch``.

    Compiled layers were measured for scoring and training on a GPU (docs/results/gpu.md), not for sampling.

    Args:
        on_gpu: whether the models are on a GPU.
        sharded: whether the models' weights are sharded.
        samples: whether an engine samples with the same layers.
    """
    return "auto" if on_gpu and not sharded and not samples else "torch"


def check_kernels(kernels: Kernels, on_gpu: bool, sharded: bool) -> None:
    """Refuse kernels that this machine cannot run, before any weights are read.

    Raises:
        ValueError: Liger kernels were chosen without a GPU, or kernels other than ``torch`` with sharded weights.
        ImportError: Liger kernels were chosen without their package.
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
    """Compile or replace layers of a model in place; results stay the same up to rounding.

    ``auto`` compiles the families that can read prefix trees, and leaves others unchanged.
    """
    tested = lm.config.model_type in SHARING and not why_unshared(lm.config)
    if kernels == "compiled" or (kernels == "auto" and tested):
        layers = decoder_layers(lm)
        if not layers and kernels == "compiled":
            raise ValueError(f"no decoder layers found in {type(lm).__name__}, so none can be compiled (key {KEY})")
        for layer in layers:
            layer.compile(dynamic=True)
    elif kernels == "liger":  # without Liger's loss, which needs logits at all positions
        # A slow import, which also imports peft if installed.
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(lm, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def checkpoint_activations(lm: PreTrainedModel) -> None:
    """Recompute activations in the backward pass, layer by layer, instead of storing activations.

    Raises:
        ValueError: the model has no layers that can be recomputed.
    """
    kwargs, enable = {"use_reentrant": False}, getattr(lm, "activation_checkpointing_enable", None)
    if enable is None:  # older versions of transformers use another name, which 6.0 removes
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        enable(activation_checkpointing_kwargs=kwargs)


def round_linear_layers(lm: PreTrainedModel, dtype: torch.dtype, but: Collection[nn.Parameter] = ()) -> None:
    """Store the frozen weights of linear layers in ``dtype``, for models that run under autocast to ``dtype``.

    Autocast caches rounded copies of trained weights only, and would round frozen weights in each forward pass. Stored
    rounded weights give bit-identical results in less time and take half the memory. An output head tied to the
    embedding is left unchanged.

    Args:
        lm: the model.
        dtype: autocast's dtype.
        but: weights to leave unchanged, since these weights are shared with another model.
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


NATIVE = {"avx512_bf16", "amx_bf16", "bf16"}  # CPU flags for bfloat16 instructions on x86 and ARM
CPUINFO = Path("/proc/cpuinfo")


def lacks_bfloat16(cpuinfo: str) -> bool:
    """Return whether no processor listed in ``cpuinfo``, the text of ``/proc/cpuinfo``, has bfloat16 instructions."""
    lists = [line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    return bool(lists) and not any(NATIVE.intersection(flags) for flags in lists)


def slow_in_bfloat16(precision: str) -> str | None:
    """Return a warning if ``precision`` makes a run on this CPU slower than float32; None if it does not."""
    if not precision.startswith("bf16") or not CPUINFO.exists() or not lacks_bfloat16(CPUINFO.read_text()):
        return None
    return (
        f"this processor has no bfloat16 instructions, so trainer.precision {precision} is several times slower here "
        "than 32-true"
    )
