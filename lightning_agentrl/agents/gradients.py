"""Gradients over micro-batches, ranks and parameter groups."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_agentrl.agents.zero import step_zero

if TYPE_CHECKING:
    from lightning_agentrl.agents.actor_critic import ActorCritic


def without_sync(module: LightningModule) -> AbstractContextManager:
    """Inside, backward passes under DDP add to the gradients of this rank only; elsewhere they share them out."""
    model = module.trainer.strategy.model
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def sync_gradients(module: ActorCritic, optimizer: Any) -> None:
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


def drop_gradients(optimizer: Any, name: str) -> None:
    """As if the parameters of a group had not been used; the group's own list, which sharded modules may hide."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["name"] == name else ():
            parameter.grad = None


def start_adam(optimizer: torch.optim.AdamW) -> None:
    """The state that Adam makes at a first step: no steps, moments of zero. Later steps are the same as without it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def step_by_group(optimizer: Any, limits: dict[str, float], held: str | None = None) -> dict[str, float]:
    """One step in which each parameter group is clipped by its own norm; the norms before clipping.

    The group ``held`` does not move and its Adam state does not age, as a gradient of zero would make it.
    """
    if any("max_norm" in group for group in optimizer.param_groups):
        return step_zero(optimizer, limits, held)
    if held is not None:
        drop_gradients(optimizer, held)
    norms = clip_by_group(optimizer, limits)
    optimizer.step()
    return {name: float(norm) for name, norm in norms.items()}


def clip_by_group(optimizer: Any, limits: dict[str, float]) -> dict[str, Tensor]:
    """Clip each parameter group by its own norm, so that one cannot shrink the other; norms before clipping."""
    norms = {}
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if parameters:
            norm = torch.nn.utils.clip_grad_norm_(parameters, limits[group["name"]])
            norms[group["name"]] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norms
