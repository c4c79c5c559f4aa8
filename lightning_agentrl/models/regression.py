"""Linear regression on states that keeps running sums: what it has seen counts less with each iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class RunningRegression(nn.Module):
    """Ridge regression of one number on states, over all that was taken in; outputs 0 everywhere at first.

    Sums are in float64, whatever the precision of the models, and do not depend on how what is taken in was split.

    Args:
        size: of a state, H.
        ridge: penalty of the squared weights, in units of the mean squared distance of a state from their mean. With 1
            it expects that states explain half of the variance of the numbers; more expects less.

    Source: Hoerl and Kennard 1970, with exponential forgetting as in recursive least squares.
    """

    moments: Tensor  # sums over all that was taken in of z z^T with z = (state, 1, number), [H + 2, H + 2]
    weights: Tensor  # [H]
    constant: Tensor  # []

    def __init__(self, size: int, ridge: float) -> None:
        super().__init__()
        self.ridge = ridge
        exact = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("moments", torch.zeros(size + 2, size + 2, dtype=torch.float64))
        self.register_buffer("weights", torch.zeros(size, dtype=exact))
        self.register_buffer("constant", torch.zeros((), dtype=exact))
        self._new: Tensor | None = None  # moments of what was taken in since the last fit

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move as any module, but never cast."""
        exact = {name: buffer.detach().clone() for name, buffer in self.named_buffers()}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def forward(self, states_RH: Tensor) -> Tensor:
        """Return the expected numbers [R] at states [R, H]; no gradient goes through them."""
        with torch.autocast(states_RH.device.type, enabled=False):
            return states_RH.detach().to(self.weights.dtype) @ self.weights + self.constant

    @torch.no_grad()
    def take_in(self, states_NH: Tensor, numbers_N: Tensor) -> None:
        """Keep states [N, H] and their numbers [N] for the next fit."""
        numbers_N = numbers_N.to(self.moments)
        seen = torch.cat([states_NH.to(self.moments), torch.ones_like(numbers_N)[:, None], numbers_N[:, None]], 1)
        new = seen.T @ seen
        self._new = new if self._new is None else self._new + new

    @torch.no_grad()
    def fit(self, total: Callable[[Tensor], Tensor], keep: float) -> None:
        """Add what was taken in since the last fit to what is kept of the sums, and solve.

        Args:
            total: sums a tensor over all ranks; every rank must call it.
            keep: factor of the sums of before.
        """
        new = total(torch.zeros_like(self.moments) if self._new is None else self._new)
        self._new = None
        self.moments.mul_(keep).add_(new.to(self.moments))
        count = float(self.moments[-2, -2])
        if not count > 0:
            return
        mean_z = self.moments[-2] / count
        about = self.moments / count - torch.outer(mean_z, mean_z)  # covariances
        apart = float(about[:-2, :-2].diagonal().clamp_min(0).sum())
        weights_H = torch.zeros_like(mean_z[:-2])
        if apart > 0:
            penalty = self.ridge * apart / count * torch.eye(len(weights_H)).to(about)
            weights_H = torch.linalg.solve(about[:-2, :-2] + penalty, about[:-2, -1])
        self.weights.copy_(weights_H)
        self.constant.copy_(mean_z[-1] - mean_z[:-2] @ weights_H)

    def forget_new(self) -> None:
        """Drop what was taken in since the last fit."""
        self._new = None
