"""What estimators and losses are given to learn what the other ranks of a run hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over all ranks. All ranks must call it."""

Gather = Callable[[Tensor], Sequence[Tensor]]
"""Returns the tensors of all ranks, in rank order; sizes may differ. All ranks must call it."""


def alone(x: Tensor) -> list[Tensor]:
    """Return a list of ``x`` alone: the :data:`Gather` of a single rank."""
    return [x]
