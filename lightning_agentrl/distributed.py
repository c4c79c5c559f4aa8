"""Exchange between the processes of a run: tensors, objects, and numbers by name. A no-op with one process."""

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
    """Return what every rank of a process group (None: of the run) holds, in rank order. All of them must call it."""
    if not in_group():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    with waiting_for_ranks():
        dist.all_gather_object(gathered, value, group)
    return gathered


def rank() -> int:
    """Return the number of this process among those of the run."""
    return dist.get_rank() if in_group() else 0


def world_size() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if in_group() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; ``x`` must lie on a device that the process group can reach."""
    if not in_group():
        return x
    x = x.clone()
    with waiting_for_ranks():
        dist.all_reduce(x)
    return x


def max_over_ranks(number: N) -> N:
    """Return the largest of the numbers that the ranks hold. All ranks must call it."""
    return max(all_gather(number))


@dataclass(frozen=True)
class Mean:
    """A sum and its divisor, both of which are summed over ranks before the division."""

    total: float
    weight: float


@dataclass(frozen=True)
class Sum:
    """A number that is summed over ranks."""

    total: float


@dataclass(frozen=True)
class Max:
    """A number whose maximum over ranks counts."""

    value: float


Number = Mean | Sum | Max


def over_ranks(numbers: Mapping[str, Number]) -> dict[str, float]:
    """Reduce numbers by name over all ranks; a rank may lack some names. Means without weight are left out."""
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
    """Raised on a rank that prints nothing, since another rank has the error."""


@contextmanager
def raise_once() -> Iterator[None]:
    """Let one rank raise an error that several ranks have inside, and stop all ranks when one has an error.

    All ranks must enter. Of those with the same error the first raises it and the others exit silently; so does a rank
    without an error while another has one. ``sys.exit`` counts as an error: the others would wait for who has left.
    """
    error: Exception | SystemExit | None = None
    try:
        yield
    except (Exception, SystemExit) as raised:
        if isinstance(raised, SystemExit) and type(raised) is not SystemExit:  # all ranks leave so, each by itself
            raise
        error = raised
    texts = all_gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        own = dist.get_rank() if len(texts) > 1 else 0
        if texts.index(texts[own]) == own:
            raise error
        raise _ToldElsewhere(0)  # the first one's exit code counts; another one would cut its message short
    if any(text is not None for text in texts):
        raise _ToldElsewhere(2)


@dataclass(frozen=True)
class Ranks:
    """Collective operations of a run, with results on the CPU. All ranks must call each method together.

    Args:
        device: the device whose tensors the process group can reach.
        count: number of ranks.
    """

    device: torch.device
    count: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return sum_over_ranks(x.to(self.device)).cpu()

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return what every rank holds, in rank order; sizes may differ."""
        return all_gather(x.cpu())
