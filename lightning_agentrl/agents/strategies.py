"""The strategies that were tried with this agent; every other one is refused by name."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from lightning_agentrl.agents.zero import check_zero

FSDP2 = "{class_path: lightning.pytorch.strategies.ModelParallelStrategy, init_args: {data_parallel_size: %d, tensor_parallel_size: 1}}"  # noqa: E501


def in_lockstep(strategy: Strategy) -> bool:
    """Return whether every forward and backward pass needs all ranks, as it does where weights are sharded."""
    return isinstance(strategy, ModelParallelStrategy | DeepSpeedStrategy)


def check_strategy(trainer: L.Trainer, lora: bool = False) -> None:
    """Refuse strategies, or settings of them, that would compute something else or were never tried.

    Raises:
        ValueError: one sentence with the key to change.
    """
    strategy, processes = trainer.strategy, trainer.num_devices * trainer.num_nodes
    if isinstance(strategy, ModelParallelStrategy):
        if lora:
            raise ValueError(
                "LoRA under ModelParallelStrategy is not supported, since its models share one frozen base; use "
                "trainer.strategy 'ddp', or remove model.init_args.lora"
            )
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
    """Refuse to split weights by tensors, as FSDP2 does by default. Call it once processes have started.

    Raises:
        ValueError: one sentence with the key to change.
    """
    if isinstance(strategy, ModelParallelStrategy) and (parts := strategy.device_mesh["tensor_parallel"].size()) != 1:
        raise ValueError(
            f"ModelParallelStrategy with tensor_parallel_size {parts} would split the vocabulary, and Σπ² needs whole "
            f"logits; set trainer.strategy to {FSDP2 % (parts * strategy.device_mesh['data_parallel'].size())}"
        )
