"""LoRA: trainable adapters on a frozen base.

Actor and critic are separate models, each with its own adapters in its own layers, but their frozen weights are the
tensors of one base. The base stays as it was loaded and is the reference policy. Weights that FSDP2 shards belong to
one model: there each trained model has its own sharded base, and the reference is the actor without its adapters.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightning_agentrl.errors import closest
from lightning_agentrl.models.families import auto_class
from lightning_agentrl.models.language_model import LanguageModel
from lightning_agentrl.models.loading import resolve_model
from lightning_agentrl.models.packing import Packed
from lightning_agentrl.models.vision import tower

KEY = "model.init_args.lora"


class LoRA:
    """Low-rank adapters on linear layers, which stay frozen. Needs the package peft.

    A separate critic without a model of its own gets adapters on the actor's base, and the reference policy is that
    base without adapters, so the weights of the model are in memory only once; under FSDP2 twice with a separate
    critic, each time shared out over all processes. Checkpoints hold the adapters and not the base. Adapters need
    learning rates about ten times those of full training.

    Args:
        rank: rank of the learned matrices.
        alpha: the adapters' output is scaled by alpha / rank; twice the rank when not given.
        dropout: dropout on the adapters' input in the update; sampling and scoring do without, so ratios differ from 1.
        targets: names of linear layers, such as q_proj; ``all-linear`` is all but the output head. What reads images
            gets no adapters.
    """

    def __init__(
        self,
        rank: int = 16,
        alpha: float | None = None,
        dropout: float = 0.0,
        targets: Literal["all-linear"] | list[str] = "all-linear",
    ) -> None:
        if rank < 1:
            raise ValueError(f"the rank of LoRA must be at least 1, got {rank} (key {KEY}.init_args.rank)")
        if alpha is not None and alpha <= 0:
            raise ValueError(f"the alpha of LoRA must be above 0, got {alpha} (key {KEY}.init_args.alpha)")
        if not 0 <= dropout < 1:
            raise ValueError(
                f"the dropout of LoRA must be at least 0 and below 1, got {dropout} (key {KEY}.init_args.dropout)"
            )
        if not targets or (isinstance(targets, str) and targets != "all-linear"):
            raise ValueError(
                f"the targets of LoRA must be 'all-linear' or a list of layer names, got {targets!r} "
                f"(key {KEY}.init_args.targets)"
            )
        self.rank = rank
        self.alpha = 2.0 * rank if alpha is None else float(alpha)
        self.dropout = dropout
        self.targets: str | list[str] = targets if isinstance(targets, str) else sorted(set(targets))

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments that define the adapters, as plain types; equal arguments give equal settings."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}

    def check(self, model: str) -> None:
        """Check that peft and the targets exist, before any weights are read.

        Raises:
            ImportError: peft is not installed.
            ValueError: the model has no linear layer with one of the names.
        """
        if importlib.util.find_spec("peft") is None:
            raise ImportError(f'LoRA needs the package peft: pip install "lightning-agentrl[lora]" (key {KEY})')
        if self.targets == "all-linear":
            return
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(resolve_model(model))
            lm = auto_class(config).from_config(config)
        layers = linear_layers(lm)
        known = sorted({name.rpartition(".")[2] for name in layers})
        for target in self.targets:
            if not any(name.endswith(f".{target}") for name in layers):
                close = closest(target, known)
                hint = f"; did you mean {close}?" if close else ""
                raise ValueError(
                    f"the model '{model}' has no linear layers named '{target}' (key {KEY}.init_args.targets); "
                    f"known: {', '.join(known)}{hint}"
                )

    def adapt(self, base: PreTrainedModel, name: str, share: bool = True) -> PreTrainedModel:
        """Freeze ``base`` and return a model with new adapters called ``name`` on its tensors.

        The model initially computes exactly what ``base`` does.

        Args:
            base: a model without adapters.
            name: of the adapters.
            share: leave ``base`` as it is, for more models on its tensors; otherwise put the adapters into it.
        """
        import peft

        lm = base.requires_grad_(False)
        lm = share_weights(lm) if share else lm
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=cast(int, self.alpha),  # only divided by the rank
            lora_dropout=self.dropout,
            target_modules=self.targets,
            exclude_modules=self._excluded(lm),
            base_model_name_or_path=durable_name(str(base.name_or_path)),
        )
        peft.inject_adapter_in_model(config, lm, name)
        return lm

    def _excluded(self, lm: PreTrainedModel) -> str | None:
        """Return a pattern of the layers that get no adapters although they are called as a target is, if any are."""
        parts = tower(lm)
        names = [name for part in parts.values() for name, layer in part.named_modules() if _can_adapt(layer)]
        if self.targets != "all-linear":
            names = [name for name in names if any(f".{name}".endswith(f".{target}") for target in self.targets)]
        return rf"{lm.base_model_prefix}\.({'|'.join(parts)})\..*" if names else None


def durable_name(model: str) -> str:
    """Return a hub id unchanged, a local folder as its full path."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def linear_layers(lm: PreTrainedModel) -> list[str]:
    """Return the full names of the layers that can have adapters."""
    left_out = {lm.get_output_embeddings(), *(layer for part in tower(lm).values() for layer in part.modules())}
    return [name for name, layer in lm.named_modules() if _can_adapt(layer) and layer not in left_out]


def _can_adapt(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


def share_weights(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a second model on the same tensors as ``lm``; a layer replaced in one is unchanged in the other."""
    tensors = {id(tensor): tensor for tensor in (*lm.parameters(), *lm.buffers())}
    return copy.deepcopy(lm, tensors)  # what is in the memo is not copied


def frozen_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that are not trained; a weight with several names appears under each."""
    return {name: p for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def has_adapters(lm: PreTrainedModel) -> bool:
    return hasattr(lm, "peft_config")


class Unadapted(LanguageModel):
    """A policy with its adapters off: the frozen model, without separate weights."""

    policy: LanguageModel

    def __init__(self, policy: LanguageModel) -> None:
        nn.Module.__init__(self)
        vars(self).update(policy=policy, lm=policy.lm)  # not registered, or the weights would be here, too
        self.recompute_logits, self.image_reader = policy.recompute_logits, policy.image_reader

    def hidden(self, packed: Packed) -> Tensor:
        """Return the last hidden states [R, H] at the logit positions."""
        with _adapters_off(self.lm):
            return self.policy.hidden(packed)


@contextmanager
def _adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    layers = adapted_layers(lm).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)  # trained again, too


def adapted_layers(lm: PreTrainedModel) -> dict[str, Any]:
    """Return peft's linear layers with adapters by name."""
    if not has_adapters(lm):
        return {}
    from peft.tuners import lora

    return {name: module for name, module in lm.named_modules() if isinstance(module, lora.Linear)}


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """Return the weight of one of :func:`adapted_layers` with its adapters merged, as a new tensor."""
    (adapter,) = layer.active_adapters
    return cast(Tensor, layer.get_base_layer().weight + layer.get_delta_weight(adapter))


@torch.no_grad()
def merge_adapters(lm: PreTrainedModel) -> PreTrainedModel:
    """Return the plain model with adapters merged into new weights; other tensors are shared, ``lm`` is unchanged."""
    plain = share_weights(lm)
    for name, module in adapted_layers(plain).items():
        layer = cast(nn.Linear, module.get_base_layer())
        layer.weight = nn.Parameter(merged_weight(module), requires_grad=False)
        plain.set_submodule(name, layer)
    for module in plain.modules():  # all in one dtype, including rounded layers
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != lm.dtype:
                setattr(module, name, nn.Parameter(parameter.to(lm.dtype), requires_grad=False))
    del plain.peft_config
    return plain
