"""Value heads: linear, in units of the returns or in units that follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

LEAST_STD = 1e-4  # where all returns are equal there is no scale


class ValueHead(nn.Module):
    """Linear head on hidden states, in float32 or better; outputs 0 everywhere at first."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and cast as any module, but never to 16 bits."""
        exact = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}
        super()._apply(fn, recurse)
        if self.linear.weight.dtype.itemsize < 4:
            self.float()
            self.load_state_dict(exact)
        return self

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """Return values [R] of hidden states [R, H]."""
        with torch.autocast(hidden_RH.device.type, enabled=False):
            return self.linear(hidden_RH.to(self.linear.weight.dtype)).sum(-1)  # of one number; [:, 0] would be a view


class PopArtHead(ValueHead):
    """Head that learns returns less their running mean, over their running standard deviation (PopArt).

    As mean and scale move, the weights are changed so that all values stay as they were. So the size of the rewards
    changes neither how fast values are learned nor, on a shared trunk, how much their loss weighs.

    Args:
        hidden_size: of the states that are read.
        step: share of the way that mean and scale go to those of each rollout, above 0 and at most 1; the first
            rollout gives them alone.

    Source: van Hasselt et al. 2016 (arXiv 1602.07714), with running means divided by the sum of their weights.
    """

    mean: Tensor  # of the returns, []
    std: Tensor  # of the returns, []
    weight: Tensor  # of all rollouts in both, []

    def __init__(self, hidden_size: int, step: float) -> None:
        super().__init__(hidden_size)
        self.step = step
        for name, first in (("mean", 0.0), ("std", 1.0), ("weight", 0.0)):
            self.register_buffer(name, torch.tensor(first, dtype=self.linear.weight.dtype))

    def normalize(self, values: Tensor) -> Tensor:
        """Return values or returns, of any shape, in the units that are learned."""
        return (values - self.mean) / self.std

    @torch.no_grad()
    def follow(self, mean: float, std: float) -> None:
        """Move mean and scale to those of the returns of a rollout; every rank must give the same."""
        old_mean, old_std, first = float(self.mean), float(self.std), not self.weight
        self.weight.lerp_(torch.ones_like(self.weight), self.step)
        share = 1.0 if first else self.step / float(self.weight)  # else rounding would leave some of the scale of 1
        spread = (1 - share) * (old_std**2 + share * (mean - old_mean) ** 2) + share * std**2
        self.mean.add_(share * (mean - old_mean))
        self.std.fill_(max(spread**0.5, LEAST_STD))
        ratio = old_std / float(self.std)
        self.linear.weight.mul_(ratio)
        self.linear.bias.mul_(ratio).add_((old_mean - float(self.mean)) / float(self.std))

    def forward(self, hidden_RH: Tensor) -> Tensor:
        """Return values [R] of hidden states [R, H], in the units of the returns."""
        return super().forward(hidden_RH) * self.std + self.mean


def value_head(hidden_size: int, popart: float | None) -> ValueHead:
    """Return the head of a critic.

    Args:
        hidden_size: of the states that are read.
        popart: see the argument ``step`` of :class:`PopArtHead`; None: a linear head.
    """
    return ValueHead(hidden_size) if popart is None else PopArtHead(hidden_size, popart)


def popart_head(critic: nn.Module | None) -> PopArtHead | None:
    """Return the head of a critic that follows the scale of the returns, if it has one."""
    parts = () if critic is None else critic.modules()
    return next((part for part in parts if isinstance(part, PopArtHead)), None)
