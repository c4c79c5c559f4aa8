"""LoRA: trainable adapters on a frozen base.

Actor and critic are separate models with separate adapters, but they share the frozen tensors of one base. The base
itself stays unchanged and is the reference policy. FSDP2 cannot share sharded weights between models: under FSDP2 each
trained model has its own sharded base, and the reference policy is the actor with its adapters disabled.
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
    """Low-rank adapters on frozen linear layers. Requires the package peft.

    A separate critic without its own ``model`` gets adapters on the actor's base, and the reference policy is that base
    without adapters, so the base is in memory only once. Under FSDP2 with a separate critic there are two copies of the
    base, each sharded over all processes. Checkpoints contain the adapters and not the base. Adapters need about ten
    times the learning rates of full training.

    Args:
        rank: rank of the learned matrices.
        alpha: numerator of the scale alpha / rank of the adapters' output; None: twice the rank.
        dropout: dropout rate on the adapters' input during updates. Sampling and scoring use no dropout, so importance
            ratios differ from 1 even before the first step.
        targets: names of linear layers, such as q_proj; ``all-linear``: all linear layers but the output head. The
            vision tower never gets adapters.
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
        """Arguments that define the adapters, in a form that can be serialized and compared."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}

    def check(self, model: str) -> None:
        """Check that peft and the targets exist, before any weights are read.

        Raises:
            ImportError: peft is not installed.
            ValueError: the model has no linear layer of a name in ``targets``.
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

        The returned model initially computes exactly the same outputs as ``base``.

        Args:
            base: a model without adapters.
            name: name of the adapters.
            share: True returns a new model that shares the tensors of ``base``; False adds the adapters to ``base``.
        """
        import peft

        lm = base.requires_grad_(False)
        lm = share_weights(lm) if share else lm
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=cast(int, self.alpha),  # peft only divides alpha by the rank
            lora_dropout=self.dropout,
            target_modules=self.targets,
            exclude_modules=self._excluded(lm),
            base_model_name_or_path=durable_name(str(base.name_or_path)),
        )
        peft.inject_adapter_in_model(config, lm, name)
        return lm

    def _excluded(self, lm: PreTrainedModel) -> str | None:
        """Return a pattern of the layers in the vision tower that match a target; None if there are none."""
        parts = tower(lm)
        names = [name for part in parts.values() for name, layer in part.named_modules() if _can_adapt(layer)]
        if self.targets != "all-linear":
            names = [name for name in names if any(f".{name}".endswith(f".{target}") for target in self.targets)]
        return rf"{lm.base_model_prefix}\.({'|'.join(parts)})\..*" if names else None


def durable_name(model: str) -> str:
    """Return a local folder as an absolute path, and a hub id unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def linear_layers(lm: PreTrainedModel) -> list[str]:
    """Return the full names of the layers that can have adapters."""
    left_out = {lm.get_output_embeddings(), *(layer for part in tower(lm).values() for layer in part.modules())}
    return [name for name, layer in lm.named_modules() if _can_adapt(layer) and layer not in left_out]


def _can_adapt(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


def share_weights(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of ``lm`` that shares its tensors; replacing a layer in one model does not change the other."""
    tensors = {id(tensor): tensor for tensor in (*lm.parameters(), *lm.buffers())}
    return copy.deepcopy(lm, tensors)  # objects in the memo are not copied


def frozen_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the frozen weights by name; a weight with several names appears under each."""
    return {name: p for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def has_adapters(lm: PreTrainedModel) -> bool:
    return hasattr(lm, "peft_config")


class Unadapted(LanguageModel):
    """A view of a policy with its adapters disabled: the frozen base, without separate weights."""

    policy: LanguageModel

    def __init__(self, policy: LanguageModel) -> None:
        nn.Module.__init__(self)
        # As plain attributes: submodules would register the weights twice.
        vars(self).update(policy=policy, lm=policy.lm)
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
            layer.enable_adapters(True)  # also makes the adapters trainable again


def adapted_layers(lm: PreTrainedModel) -> dict[str, Any]:
    """Return peft's linear layers with adapters by name."""
    if not has_adapters(lm):
        return {}
    from peft.tuners import lora

    return {name: module for name, module in lm.named_modules() if isinstance(module, lora.Linear)}


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """Return the weight of an adapted layer (:func:`adapted_layers`) with merged adapters, as a new tensor."""
    (adapter,) = layer.active_adapters
    return cast(Tensor, layer.get_base_layer().weight + layer.get_delta_weight(adapter))


@torch.no_grad()
def merge_adapters(lm: PreTrainedModel) -> PreTrainedModel:
    """Return a plain model with adapters merged into new weights; other tensors are shared, ``lm`` is unchanged."""
    plain = share_weights(lm)
    for name, module in adapted_layers(plain).items():
        layer = cast(nn.Linear, module.get_base_layer())
        layer.weight = nn.Parameter(merged_weight(module), requires_grad=False)
        plain.set_submodule(name, layer)
    for module in plain.modules():  # convert frozen layers that were stored rounded
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != lm.dtype:
                setattr(module, name, nn.Parameter(parameter.to(lm.dtype), requires_grad=False))
    del plain.peft_config
    return plain
