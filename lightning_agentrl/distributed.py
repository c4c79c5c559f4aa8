"""Communication between the processes of a run: tensors, objects, and metrics. A no-op with one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_agentrl.stalls import waiting_for_ranks

T = TypeVar("T")
N = TypeVar("N", int, float)


def in_group() -> bool:
    """Return whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def all_gather(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks in ``group`` (None: the whole run), in rank order. Each rank must call this."""
    if not in_group():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with waiting_for_ranks():
        dist.all_gather_object(gathered, value, group)
    return gathered


def rank() -> int:
    """Return the rank of this process in the run."""
    return dist.get_rank() if in_group() else 0


def world_size() -> int:
    """Return the number of processes in the run."""
    return dist.get_world_size() if in_group() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; ``x`` must be on a device that the process group supports."""
    if not in_group():
        return x
    x = x.clone()
    with waiting_for_ranks():
        dist.all_reduce(x)
    return x


def max_over_ranks(number: N) -> N:
    """Return the largest number over all ranks. All ranks must call this function."""
    return max(all_gather(number))


@dataclass(frozen=True)
class Mean:
    """A mean over ranks: totals and weights are summed over ranks, then divided."""

    total: float
    weight: float


@dataclass(frozen=True)
class Sum:
    """A number that is summed over ranks."""

    total: float


@dataclass(frozen=True)
class Max:
    """A number whose maximum over ranks is taken."""

    value: float


Number = Mean | Sum | Max


def over_ranks(numbers: Mapping[str, Number]) -> dict[str, float]:
    """Reduce numbers by name over all ranks; ranks may lack some names. Means with a total weight of 0 are omitted."""
    totals: defaultdict[str, float] = defaultdict(float)
    weights: defaultdict[str, float] = defaultdict(float)
    reduced: dict[str, float] = {}
    for part in all_gather(dict(numbers)):
        for name, number in part.items():
            if isinstance(number, Max):
                reduced[name] = max(number.value, reduced.get(name, number.value))
                continue
            totals[name] += number.total
            if isinstance(number, Mean):
                weights[name] += number.weight
    for name, total in totals.items():
        if name not in weights:
            reduced[name] = total
        elif weights[name]:
            reduced[name] = total / weights[name]
    return dict(sorted(reduced.items()))


class _ToldElsewhere(SystemExit):
    """Exit of a rank without a message, since another rank raises the error."""


@contextmanager
def raise_once() -> Iterator[None]:
    """Stop all ranks if one rank raises an error in this context, and raise that error on one rank only.

    All ranks must enter this context. Among ranks with the same error, the first rank raises the error; all other ranks
    exit silently. ``sys.exit`` counts as an error, since other ranks would wait for a rank that has exited.
    """
    error: Exception | SystemExit | None = None
    try:
        yield
    except (Exception, SystemExit) as raised:
        if isinstance(raised, SystemExit) and type(raised) is not SystemExit:  # subclasses are raised on all ranks
            raise
        error = raised
    texts = all_gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        own = dist.get_rank() if len(texts) > 1 else 0
        if texts.index(texts[own]) == own:
            raise error
        # With a nonzero exit code, the launcher could kill the first rank before that rank prints its message.
        raise _ToldElsewhere(0)
    if any(text is not None for text in texts):
        raise _ToldElsewhere(2)


@dataclass(frozen=True)
class Ranks:
    """Collective operations of a run, with results on the CPU. All ranks must call each method together.

    Args:
        device: device of this rank, whose tensors the process group supports.
        count: number of ranks.
    """

    device: torch.device
    count: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return sum_over_ranks(x.to(self.device)).cpu()

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in rank order; sizes may differ."""
        return all_gather(x.cpu())
