"""Ranks of a run as threads that exchange tensors, so that code which asks all ranks is tested without processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

from torch import Tensor

from lightning_agentrl.losses import Gather

T = TypeVar("T")


def on_ranks(work: Callable[[int, Gather], T], count: int = 2) -> list[T]:
    """What ``work(rank, gather)`` gives on each rank; every rank has to call gather equally often."""
    slots: list[Tensor | None] = [None] * count
    barrier = Barrier(count, timeout=60)

    def of(rank: int) -> T:
        def gather(x: Tensor) -> list[Tensor]:
            slots[rank] = x
            barrier.wait()
            everything = [slot for slot in slots if slot is not None]
            barrier.wait()
            return everything

        return work(rank, gather)

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(of, rank) for rank in range(count)]]


def summed(gather: Gather) -> Callable[[Tensor], Tensor]:
    """A sum over ranks."""

    def reduce(x: Tensor) -> Tensor:
        first, *others = gather(x)
        for other in others:
            first = first + other
        return first

    return reduce
