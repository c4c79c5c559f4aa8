"""How often the host waits for a device, as torch counts it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def waits(work: Callable[[], None], device: str) -> int | None:
    """How often torch noticed that the host waited for the GPU; None on a CPU."""
    if device != "cuda":
        work()
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
