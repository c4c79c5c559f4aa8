"""The optimizer of actor and critic: its groups, gradients over ranks, and the step that a guard may skip."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_agentrl.agents.master_weights import MasterWeights
from lightning_agentrl.agents.models import Models
from lightning_agentrl.agents.schedule import Schedules
from lightning_agentrl.agents.zero import GroupedAdamW, is_grouped, step_zero
from lightning_agentrl.types.plain_config import check_kind


@dataclass(frozen=True)
class Optim:
    """AdamW on two parameter groups, each with its own learning rate and clip. A step that is not finite is not taken.

    Args:
        lr_actor: learning rate of the actor.
        lr_critic: learning rate of the critic.
        weight_decay: of both groups.
        max_grad_norm_actor: clip of the norm of the actor's gradient.
        max_grad_norm_critic: clip of the norm of the critic's gradient.
        max_not_finite: so many steps in a row whose loss or gradient is not finite stop the run.
        schedule: how the learning rates change over the run; constant by default.
    """

    lr_actor: float = 1e-6
    lr_critic: float = 1e-5
    weight_decay: float = 0.01
    max_grad_norm_actor: float = 1.0
    max_grad_norm_critic: float = 1.0
    max_not_finite: int = 5
    schedule: Schedules = field(default_factory=Schedules)

    def __post_init__(self) -> None:
        check_kind(self.schedule, Schedules, "model.init_args.optim.schedule")
        for name in ("lr_actor", "lr_critic", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.init_args.optim.{name} must be at least 0, got {getattr(self, name)}")
        for name in ("max_grad_norm_actor", "max_grad_norm_critic"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.init_args.optim.{name} must be above 0, got {getattr(self, name)}")
        if self.max_not_finite < 1:
            raise ValueError(f"model.init_args.optim.max_not_finite must be at least 1, got {self.max_not_finite}")

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates by group."""
        return {"actor": self.lr_actor, "critic": self.lr_critic}

    @property
    def limits(self) -> dict[str, float]:
        """Clips of the gradient norm by group."""
        return {"actor": self.max_grad_norm_actor, "critic": self.max_grad_norm_critic}


def make_optimizer(
    models: Models, masters: MasterWeights, optim: Optim, zero: bool, sharded: bool
) -> torch.optim.AdamW:
    """Make AdamW with a group ``actor`` and, where there is a critic with weights to train, a group ``critic``.

    Args:
        models: those whose weights are trained.
        masters: float32 copies that stand for weights of 16 bits.
        optim: rates.
        zero: whether DeepSpeed wraps it.
        sharded: under FSDP2, where a distributed checkpoint takes no state that is missing.
    """
    named: list[tuple[str, nn.Module | None]] = [("actor", models.actor), ("critic", models.critic)]
    groups: list[dict[str, Any]] = [
        {"name": name, "params": masters.of(_trainable(model)), "lr": optim.rates[name]}
        for name, model in named
        if model is not None and (model is models.actor or _trainable(model))
    ]
    kind = GroupedAdamW if zero else torch.optim.AdamW
    optimizer = kind(groups, weight_decay=optim.weight_decay, fused=True)
    if sharded:
        _start_adam(optimizer)
    return optimizer


def not_stepped_on(
    parameters: Iterable[tuple[str, nn.Parameter]], masters: MasterWeights, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Return the names of the parameters that have gradients and are in no group of the optimizer."""
    groups = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    return [name for name, parameter in trainable if id(masters.of([parameter])[0]) not in groups]


def without_sync(model: nn.Module) -> AbstractContextManager:
    """Keep backward passes under DDP from averaging gradients over ranks; other strategies are left as they are."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def sync_gradients(
    model: nn.Module,
    optimizer: Any,
    masters: MasterWeights,
    world_size: int,
    backward: Callable[[Tensor], None],
    held: Collection[str] = (),
) -> None:
    """Average the gradients of a step over ranks under DDP; other strategies have done so already.

    One more backward pass of a zero loss that touches every parameter does it: whatever the micro-batches of this rank
    left out (a frozen actor, no rows at all), all ranks take part. DDP does not see gradients that are added up in
    master weights; they are averaged here, but for those of groups that are held.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    if not masters:
        zero = torch.zeros((), device=next(model.parameters()).device)
        backward(sum((0.0 * p.sum() for p in model.parameters() if p.requires_grad), zero))
        return
    moved = [group["params"] for group in optimizer.param_groups if group["name"] not in held]
    for parameter in (p for parameters in moved for p in parameters):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world_size


def step_by_group(
    optimizer: Any,
    limits: dict[str, float],
    held: Collection[str],
    allowed: Callable[[dict[str, float]], bool],
    discard: Callable[[], object],
) -> dict[str, float]:
    """Clip each parameter group by its own norm, ask, then step all groups or none.

    Under ZeRO the optimizer that it wraps clips and skips, and norms are not known before the step.

    Args:
        optimizer: with the gradients of a whole mini-batch.
        limits: clips by group.
        held: groups that do not move, and whose Adam state does not decay, as it would with a gradient of zero; the
            same on all ranks. With all groups held the step counts as one all the same.
        allowed: returns, for the norms before clipping, whether to step; the same on all ranks.
        discard: under ZeRO, takes a step with all groups held that does not count as one.

    Returns:
        Norms before clipping of the groups that have a gradient.
    """
    if is_grouped(optimizer):
        if allowed({}):
            return step_zero(optimizer, limits, held, optimizer.step)
        return step_zero(optimizer, limits, list(limits), discard)
    drop_gradients(optimizer, held)
    norms = {name: float(norm) for name, norm in clip_by_group(optimizer, limits).items()}
    if allowed(norms):
        optimizer.step()
    return norms


def clip_by_group(optimizer: Any, limits: dict[str, float]) -> dict[str, Tensor]:
    """Clip each parameter group by its own norm, so that one cannot shrink the other.

    Returns:
        Norms before clipping, by group.
    """
    norms = {}
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if parameters:
            norm = torch.nn.utils.clip_grad_norm_(parameters, limits[group["name"]])
            norms[group["name"]] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norms


def drop_gradients(optimizer: Any, names: Collection[str]) -> None:
    """Remove the gradients of groups; read from the groups themselves, since sharded modules may hide parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["name"] in names else ():
            parameter.grad = None


def _start_adam(optimizer: torch.optim.AdamW) -> None:
    """Give Adam the state that it would create at its first step; its steps are the same as without it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
