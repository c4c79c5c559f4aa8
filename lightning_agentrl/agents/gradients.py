"""Gradients over micro-batches, ranks and parameter groups."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lightning_agentrl.agents.agent import Agent


def without_sync(module: LightningModule) -> AbstractContextManager:
    """Inside, backward passes add to the gradients of this rank only."""
    strategy = module.trainer.strategy
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()


def sync_gradients(module: Agent, optimizer: Any) -> None:
    """Average the gradients over ranks.

    Under DDP one more backward pass of a zero loss that touches every parameter does it: whatever the micro-batches
    of this rank left out (a frozen actor, no rows at all), all ranks take part. Gradients that are added up in masters
    of the weights are out of its reach and averaged here.
    """
    if not isinstance(module.trainer.strategy.model, DistributedDataParallel):
        return
    if module.masters:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= module.trainer.world_size
    else:
        zero = torch.zeros((), device=module.device)
        module.manual_backward(sum((0.0 * p.sum() for p in module.parameters() if p.requires_grad), zero))


def clip_by_group(optimizer: Any, limits: dict[str, float]) -> dict[str, Tensor]:
    """Clip each parameter group by its own norm, so that one cannot shrink the other; norms before clipping."""
    norms = {}
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if parameters:
            norms[group["name"]] = torch.nn.utils.clip_grad_norm_(parameters, limits[group["name"]])
    return norms
