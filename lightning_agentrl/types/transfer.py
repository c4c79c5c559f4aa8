"""Integer tensors, and asynchronous copies to and from a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device, asynchronously but in order with the device's other work."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)  # copies from unpinned memory would block
    return x.to(device)


def integers(numbers: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return an int64 tensor, created by numpy, which is three times as fast as torch for long lists."""
    return to_device(torch.from_numpy(np.array(numbers, dtype=np.int64)), device)


def to_host(x: Tensor) -> Tensor:
    """Copy a tensor to main memory asynchronously; call :func:`wait_for` before reading the copy."""
    return x.to("cpu", non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all work that this thread has submitted."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
