"""Float32 master weights of 16-bit weights, for `trainer.precision: bf16-true`.

A small step would be lost in a bfloat16 weight, and a small gradient in a bfloat16 sum. So gradients of micro-batches
are summed in float32, the optimizer updates float32 copies, and the copies are rounded into the model after each step.
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
        parameters: parameters of the model with their names.
        saved: float32 weights of a checkpoint by name; each is used if it rounds to the model's weight. Other master
            weights start as copies of the model's weights.
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
        """Return the tensors that the optimizer updates: the master weights of these parameters."""
        return [self._masters.get(parameter, parameter) for parameter in parameters]

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy rounded master weights to the model after each step of the optimizer.

        Raises:
            ConfigError: the optimizer has a 16-bit weight instead of its master weight; only master weights get
                gradients.
        """
        if any(weight in self._masters for group in optimizer.param_groups for weight in group["params"]):
            raise ConfigError(
                "16-bit weights are trained through float32 master weights: configure_optimizers must return an "
                "optimizer of the parameters in the groups of super().configure_optimizers()"
            )
        if self._masters:  # there are no master weights under ZeRO, whose optimizer does not support hooks
            optimizer.register_step_post_hook(self._round)

    def in_place_of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Replace weights by their master weights, if any; tied weights are replaced under each name."""
        by_memory = {parameter.data_ptr(): master.detach() for parameter, master in self._masters.items()}
        return {name: by_memory.get(weight.data_ptr(), weight) for name, weight in weights.items()}

    def release(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """Remove the gradient hooks, before a new run creates its own master weights.

        Args:
            parameters: parameters of the model with their names.

        Returns:
            Master weights by name, without those whose 16-bit weight was changed since.
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
        master = self._masters[parameter]  # type: ignore[index]  # hooks receive the parameter itself
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
