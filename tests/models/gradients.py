"""The gradient of hidden states, to be compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradient(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return the gradient [W] of a sum in which every number has another weight."""
    module.zero_grad()
    (hidden * torch.linspace(-1, 2, hidden.numel()).view_as(hidden)).sum().backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
