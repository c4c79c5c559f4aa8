"""Weights that have changed a little, as after an update."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def move(module: nn.Module, seed: int, share: float = 0.02) -> None:
    """Add noise to every trained weight, of scale `share` times its root mean square; weights of all 0 move too."""
    random = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        size = float(own.float().square().mean().sqrt()) if own.numel() else 0.0
        noise = torch.randn(own.shape, generator=random) * share * (size or 1.0)
        own.add_(noise.to(own.device, own.dtype))
