"""What a forward pass computes in, and where what is random in it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision


@contextmanager
def cached_precision(plugin: Precision) -> Iterator[None]:
    """Use the trainer's precision; under autocast, cast weights once and not in each forward pass."""
    if isinstance(plugin, HalfPrecision | DoublePrecision):  # weights say it all; what their contexts set is the
        yield  # default dtype of all threads
        return
    with plugin.forward_context():
        torch.set_autocast_cache_enabled(True)  # Lightning turns it off; autocast restores it on leaving
        yield


@contextmanager
def random_from(seed: int, device: torch.device) -> Iterator[None]:
    """Draw what is random in passes on a device, such as dropout, from a seed, and leave random states as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would look for devices of all kinds
        for one in devices:
            torch.cuda.default_generators[one.index or 0].manual_seed(seed)
        yield
