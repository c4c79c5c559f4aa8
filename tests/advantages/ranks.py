"""Two ranks as two threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def on_two_ranks(fn: Callable[[int, Callable[[Tensor], Tensor]], T]) -> list[T]:
    """Run ``fn(rank, reduce)`` in two threads; `reduce` meets the other rank and sums in place, as all_reduce does."""
    barrier, posted = Barrier(2, timeout=60), [torch.zeros(()), torch.zeros(())]

    def run(rank: int) -> T:
        def reduce(x: Tensor) -> Tensor:
            posted[rank] = x.clone()
            barrier.wait()
            x.copy_(posted[0] + posted[1])
            barrier.wait()
            return x

        return fn(rank, reduce)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))
