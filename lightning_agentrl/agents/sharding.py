"""Strategies that shard models over ranks: checks of their settings, and support of DeepSpeed ZeRO.

ZeRO wraps an optimizer and passes it this rank's shard of each parameter group as one flat tensor. So clipping by
group, and holding the actor in the critic warm-up, are done inside the wrapped optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn

from lightning_agentrl.distributed import sum_over_ranks

FSDP2 = "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: {data_parallel_size: %d, tensor_parallel_size: 1}}"  # noqa: E501
STAGES = (1, 2)
ZERO_PRECISIONS = ("32-true", "bf16-mixed")


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """Return the trainer that a module is attached to; None if there is none, for example when it is exported."""
    try:
        return module.trainer
    except RuntimeError:
        return None


def in_lockstep(strategy: Strategy) -> bool:
    """Return whether every forward and backward pass requires all ranks, as with sharded weights."""
    return isinstance(strategy, ModelParallelStrategy | DeepSpeedStrategy)


def check_strategy(trainer: L.Trainer, lora: bool = False) -> None:
    """Refuse strategies, and settings of strategies, that give wrong results or are untested.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    strategy, processes = trainer.strategy, trainer.num_devices * trainer.num_nodes
    if isinstance(strategy, ModelParallelStrategy):
        if trainer.precision == "bf16-true":
            raise ValueError(
                "trainer.precision 'bf16-true' under ModelParallelStrategy is not supported; bf16-mixed gathers "
                "weights in bfloat16 and keeps float32 shards of them"
            )
    elif isinstance(strategy, FSDPStrategy):
        raise ValueError(
            "trainer.strategy FSDPStrategy, the first version of FSDP, adds up gradients of micro-batches wrongly; use "
            f"the second: {FSDP2 % processes}"
        )
    elif isinstance(strategy, DeepSpeedStrategy):
        check_zero(strategy, trainer.precision, lora)
    elif not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        raise ValueError(
            f"trainer.strategy {type(strategy).__name__} is not supported; use 'auto' for one process, 'ddp' for "
            f"several, or for models that do not fit on one device {FSDP2 % processes}"
        )


def check_mesh(strategy: Strategy) -> None:
    """Refuse tensor parallelism, which ModelParallelStrategy uses by default. Call it after processes have started.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    if isinstance(strategy, ModelParallelStrategy) and (parts := strategy.device_mesh["tensor_parallel"].size()) != 1:
        processes = parts * strategy.device_mesh["data_parallel"].size()
        raise ValueError(
            f"ModelParallelStrategy with tensor_parallel_size {parts} is not supported, since it needs a plan for each "
            "family of models; FSDP2 saves as much memory, and compute.sequence_parallel splits long rows: set "
            f"trainer.strategy to {FSDP2 % processes}"
        )


class GroupedAdamW(torch.optim.AdamW):
    """AdamW that clips each parameter group to ``max_norm`` and skips groups marked ``held``.

    Each rank has a shard of the gradients; norms are computed over all ranks and stored as ``grad_norm`` of the group.
    A held group gets no state and no weight decay.
    """

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        for group in self.param_groups:
            group.update(max_norm=float("inf"), held=False, grad_norm=0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            shares = [p.grad for p in group["params"] if p.grad is not None]
            if group["held"]:
                for parameter in group["params"]:
                    parameter.grad = None
            elif shares:
                group["grad_norm"] = _clip_shares(shares, group["max_norm"])
        return super().step(closure)


def _clip_shares(shares: list[Tensor], max_norm: float) -> float:
    """Clip a gradient in place, given this rank's shards, like ``clip_grad_norm_``; return the norm over all ranks."""
    squares = torch.stack([share.double().square().sum() for share in shares]).sum()
    norm = float(sum_over_ranks(squares).sqrt())
    for share in shares:
        share.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def is_grouped(optimizer: Any) -> bool:
    """Return whether the optimizer, or the optimizer that it wraps, is a :class:`GroupedAdamW`."""
    return "max_norm" in optimizer.param_groups[0]


class GradientWatch:
    """Check whether this rank's gradients are finite while they are computed, since ZeRO removes them immediately."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._norms: list[Tensor] = []
        self._hooks = [parameter.register_hook(self._see) for parameter in parameters]

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _see(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach()))

    def finite(self) -> Tensor:
        """Return whether all gradients since the last call were finite, as a scalar tensor on the device."""
        norms, self._norms = self._norms, []
        return torch.stack(norms).isfinite().all() if norms else torch.tensor(True)


class AutocastUnderZero(DeepSpeedPrecision):
    """``bf16-mixed`` by torch's autocast under DeepSpeed.

    DeepSpeed's own bfloat16 mode would round all weights and sum gradients in bfloat16. Here, DeepSpeed's engine gets
    float32 weights and runs steps without autocast, and the agent enters autocast.
    """

    def __init__(self, device: str) -> None:
        super().__init__("32-true")
        self.precision = "bf16-mixed"  # same name as in Lightning
        self._device = device

    def forward_context(self) -> AbstractContextManager:
        return torch.autocast(self._device, torch.bfloat16, cache_enabled=False)

    def train_step_context(self) -> AbstractContextManager:  # type: ignore[override]
        return nullcontext()

    def val_step_context(self) -> AbstractContextManager:  # type: ignore[override]
        return nullcontext()


def prepare_zero(strategy: DeepSpeedStrategy) -> None:
    """Configure DeepSpeed so that the agent decides when to step, after any number of micro-batches."""
    config: Any = strategy.config
    if strategy.precision_plugin.precision == "bf16-mixed":
        strategy.precision_plugin = AutocastUnderZero(strategy.root_device.type)
        config["bf16"] = {"enabled": False}  # Lightning enables bf16 unless this is set
    config["managed_gradient_accumulation"] = False
    # DeepSpeed uses this key only in its logs. Without this key, Lightning would request a data loader too early.
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    if config["zero_optimization"]["stage"] < 2:
        config["zero_optimization"]["overlap_comm"] = False  # stage 1 reduces gradients only before the step


def check_zero(strategy: DeepSpeedStrategy, precision: str, lora: bool) -> None:
    """Refuse settings of DeepSpeed that give wrong results or are untested.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    config: Any = strategy.config or {}
    zero = config.get("zero_optimization", {})
    if zero.get("stage") not in STAGES:
        raise ValueError(
            f"DeepSpeedStrategy with stage {zero.get('stage')} is not supported: scoring and sampling need unsharded "
            f"weights; set trainer.strategy.init_args.stage to one of {', '.join(map(str, STAGES))}, or use "
            "ModelParallelStrategy, which shards as much"
        )
    if precision not in ZERO_PRECISIONS:
        raise ValueError(
            f"trainer.precision '{precision}' under DeepSpeedStrategy would round all weights, also the value head; "
            f"use one of {', '.join(ZERO_PRECISIONS)}"
        )
    if config.get("gradient_clipping"):
        raise ValueError(
            "gradient_clipping of DeepSpeed would clip actor and critic by one norm: remove it from its config and set "
            "model.init_args.optim.max_grad_norm_actor and model.init_args.optim.max_grad_norm_critic"
        )
    if any(zero.get(key) for key in ("offload_optimizer", "offload_param")):
        raise ValueError(
            "DeepSpeedStrategy with offloading computed different gradients in a test; remove it from "
            "trainer.strategy.init_args, or use ModelParallelStrategy on more devices"
        )
    if lora:
        raise ValueError(
            "LoRA under DeepSpeedStrategy is untested; use trainer.strategy 'ddp' if the frozen model fits on each "
            "device, else ModelParallelStrategy"
        )
