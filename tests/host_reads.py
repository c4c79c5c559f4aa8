"""How often the host waits for a device: operations whose result it reads, and the waits that torch notices."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
COPIES = {"aten::_to_copy", "aten::copy_"}


class HostReads(TorchDispatchMode):
    """Counts what the host reads, in the thread that it is entered in."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in READS or (name in COPIES and result.device.type == "cpu" and _on_a_gpu(args)):
            self.counts[name] += 1
        return result


def _on_a_gpu(args: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)


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
