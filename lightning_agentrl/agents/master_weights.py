"""Float32 masters of 16-bit weights, for `trainer.precision: bf16-true`.

A small step would be lost in a bfloat16 weight, and a small gradient in a bfloat16 sum. So gradients are added up in
float32 micro-batch by micro-batch, the optimizer steps on float32 copies, and the model gets them rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_agentrl.errors import ConfigError


class MasterWeights:
    """Float32 master weights of 16-bit parameters; other parameters are their own masters.

    Args:
        parameters: by name.
        saved: float32 weights of a checkpoint by name, each taken if the model still has it rounded; other masters
            begin as what the model has.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], saved: Mapping[str, Tensor]) -> None:
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        self._hooks = list[RemovableHandle]()
        for name, parameter in parameters:
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                first = parameter.detach()
                if name in saved and _rounded_to(saved[name], first):
                    first = saved[name]
                master = nn.Parameter(first.to(parameter.device, torch.float32, copy=True))
                self._masters[parameter] = master
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))

    def __len__(self) -> int:
        return len(self._masters)

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return what the optimizer steps on: the masters of these parameters."""
        return [self._masters.get(parameter, parameter) for parameter in parameters]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the masters into the model after each step.

        Raises:
            ConfigError: the optimizer would step on a weight that has a master, and gets no gradient.
        """
        if any(weight in self._masters for group in optimizer.param_groups for weight in group["params"]):
            raise ConfigError(
                "weights of 16 bits have float32 masters, which alone get gradients: configure_optimizers must return "
                "an optimizer of the parameters in the groups of super().configure_optimizers()"
            )
        if self._masters:  # never under ZeRO, whose optimizer takes no hooks
            optimizer.register_step_post_hook(self._round)

    def in_place_of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return these weights by name, replaced by their master weights, if any; tied ones under each name."""
        by_memory = {parameter.data_ptr(): master.detach() for parameter, master in self._masters.items()}
        return {name: by_memory.get(weight.data_ptr(), weight) for name, weight in weights.items()}

    def release(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Take no more gradients, which are for the masters of the next run.

        Args:
            parameters: by name.

        Returns:
            Masters by name, of those weights that are still what they were rounded to.
        """
        for hook in self._hooks:
            hook.remove()
        pairs = ((name, weight, self._masters.get(weight)) for name, weight in parameters)
        return {
            name: master.detach()
            for name, weight, master in pairs
            if master is not None and _rounded_to(master.detach(), weight)
        }

    @torch.no_grad()
    def _take_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        master = self._masters[parameter]  # type: ignore[index]  # hooks are given the parameter itself
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    @torch.no_grad()
    def _round(self, *_: Any) -> None:
        for parameter, master in self._masters.items():
            parameter.copy_(master)


def _rounded_to(master: Tensor, weight: Tensor) -> bool:
    return torch.equal(master.to(weight), weight)
