"""Faster kernels for the layers between matrix products: norms, rotary positions, gated activations."""

from __future__ import annotations

import importlib.util
from typing import Literal

from transformers import PreTrainedModel

from lightning_agentrl.models.families import SHARING, why_unshared
from lightning_agentrl.models.last_layer import decoder_layers

Kernels = Literal["auto", "torch", "compiled", "liger"]

KEY = "model.init_args.compute.kernels"


def automatic_kernels(on_gpu: bool, sharded: bool, samples: bool) -> Kernels:
    """Return what ``auto`` means on this device: ``torch``, or ``auto`` for compiled layers of tested families.

    Compiled layers were measured where a GPU scores and trains (docs/results/gpu_runs.md), not where it also samples.

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
