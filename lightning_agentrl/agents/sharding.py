"""Strategies that share models out over ranks: which are supported, and how DeepSpeed ZeRO takes part in an update.

ZeRO gives the step of each parameter group to the optimizer that it wraps, with this rank's share of the group as one
flat tensor. So what is done per group, clipping it and holding it still in the warm-up, is done inside that optimizer.
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
    """Return the trainer that a module is attached to; None if there is none, as when it is loaded for an export."""
    try:
        return module.trainer
    except RuntimeError:
        return None


def in_lockstep(strategy: Strategy) -> bool:
    """Return whether every forward and backward pass needs all ranks, as with sharded weights."""
    return isinstance(strategy, ModelParallelStrategy | DeepSpeedStrategy)


def check_strategy(trainer: L.Trainer, lora: bool = False) -> None:
    """Refuse strategies, or settings of them, that would compute something else or were never tried.

    Raises:
        ValueError: one sentence with the key to change.
    """
    strategy, processes = trainer.strategy, trainer.num_devices * trainer.num_nodes
    if isinstance(strategy, ModelParallelStrategy):
        if trainer.precision == "bf16-true":
            raise ValueError(
                "trainer.precision 'bf16-true' under ModelParallelStrategy is not supported; bf16-mixed gathers "
                "weights in bfloat16 and keeps float32 shares of them"
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
    """Refuse tensor parallelism, which ModelParallelStrategy has by default. Call it once processes have started.

    Raises:
        ValueError: one sentence with the key to change.
    """
    if isinstance(strategy, ModelParallelStrategy) and (parts := strategy.device_mesh["tensor_parallel"].size()) != 1:
        processes = parts * strategy.device_mesh["data_parallel"].size()
        raise ValueError(
            f"ModelParallelStrategy with tensor_parallel_size {parts} is not supported, since it needs a plan for each "
            "family of models; FSDP2 shares out the same memory, and compute.sequence_parallel long rows: set "
            f"trainer.strategy to {FSDP2 % processes}"
        )


class GroupedAdamW(torch.optim.AdamW):
    """AdamW with a clip (``max_norm``) and a standstill (``held``) per group.

    Each rank has a share of the gradients, so the norm is over all ranks; it is left in ``grad_norm``. A group that is
    held gets no state and no weight decay.
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
    """Scale this rank's shares of a gradient in place, as ``clip_grad_norm_`` does a whole one; return the norm."""
    squares = torch.stack([share.double().square().sum() for share in shares]).sum()
    norm = float(sum_over_ranks(squares).sqrt())
    for share in shares:
        share.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def is_grouped(optimizer: Any) -> bool:
    """Return whether the optimizer, or the one it wraps, is a :class:`GroupedAdamW`."""
    return "max_norm" in optimizer.param_groups[0]


class GradientWatch:
    """Check that gradients of this rank are finite as they are computed, since ZeRO moves them away at once."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._norms: list[Tensor] = []
        self._hooks = [parameter.register_hook(self._see) for parameter in parameters]

    def release(self) -> None:
        """Look at no more gradients."""
        for hook in self._hooks:
            hook.remove()

    def _see(self, gradient: Tensor) -> None:
        self._norms.append(torch.linalg.vector_norm(gradient.detach()))

    def finite(self) -> Tensor:
        """Return whether all gradients since the last call were finite; a scalar on the device."""
        norms, self._norms = self._norms, []
        return torch.stack(norms).isfinite().all() if norms else torch.tensor(True)


class AutocastUnderZero(DeepSpeedPrecision):
    """``bf16-mixed`` with torch's autocast; DeepSpeed's mode would round all weights and sum gradients in bfloat16.

    DeepSpeed's engine gets float32 weights and calls the steps without autocast; the agent enters autocast.
    """

    def __init__(self, device: str) -> None:
        super().__init__("32-true")
        self.precision = "bf16-mixed"  # as Lightning reports it
        self._device = device

    def forward_context(self) -> AbstractContextManager:
        return torch.autocast(self._device, torch.bfloat16, cache_enabled=False)

    def train_step_context(self) -> AbstractContextManager:  # type: ignore[override]
        return nullcontext()

    def val_step_context(self) -> AbstractContextManager:  # type: ignore[override]
        return nullcontext()


def prepare_zero(strategy: DeepSpeedStrategy) -> None:
    """Set what DeepSpeed needs for micro-batches to add up: we say when to step, after any number of them."""
    config: Any = strategy.config
    if strategy.precision_plugin.precision == "bf16-mixed":
        strategy.precision_plugin = AutocastUnderZero(strategy.root_device.type)
        config["bf16"] = {"enabled": False}  # else Lightning would enable it
    config["managed_gradient_accumulation"] = False
    config.setdefault("train_micro_batch_size_per_gpu", 1)  # for its logs; Lightning would ask the loader too early
    if config["zero_optimization"]["stage"] < 2:
        config["zero_optimization"]["overlap_comm"] = False  # there is nothing to overlap before the step


def zero_stage(strategy: Strategy) -> int:
    """Return the stage of ZeRO; 0 for other strategies."""
    config: Any = strategy.config if isinstance(strategy, DeepSpeedStrategy) else None
    return int(config["zero_optimization"]["stage"]) if config else 0


def check_zero(strategy: DeepSpeedStrategy, precision: str, lora: bool) -> None:
    """Refuse settings that were never tried or would compute something else.

    Raises:
        ValueError: one sentence with the key to change.
    """
    config: Any = strategy.config or {}
    zero = config.get("zero_optimization", {})
    if zero.get("stage") not in STAGES:
        raise ValueError(
            f"DeepSpeedStrategy with stage {zero.get('stage')} is not supported: models are read, and replies sampled, "
            f"from whole weights; set trainer.strategy.init_args.stage to one of {', '.join(map(str, STAGES))}, or use "
            "ModelParallelStrategy, which shares out the same"
        )
    if precision not in ZERO_PRECISIONS:
        raise ValueError(
            f"trainer.precision '{precision}' under DeepSpeedStrategy would round all weights, the value head too; "
            f"use one of {', '.join(ZERO_PRECISIONS)}"
        )
    if config.get("gradient_clipping"):
        raise ValueError(
            "gradient_clipping of DeepSpeed would clip actor and critic by one norm: remove it from its config and set "
            "model.init_args.optim.max_grad_norm_actor and model.init_args.optim.max_grad_norm_critic"
        )
    if any(zero.get(key) for key in ("offload_optimizer", "offload_param")):
        raise ValueError(
            "DeepSpeedStrategy with offloading computed other gradients when it was tried; remove it from "
            "trainer.strategy.init_args, or use ModelParallelStrategy on more devices"
        )
    if lora:
        raise ValueError(
            "LoRA under DeepSpeedStrategy was not tried; use trainer.strategy 'ddp' if the frozen model fits on each "
            "device, else ModelParallelStrategy"
        )
