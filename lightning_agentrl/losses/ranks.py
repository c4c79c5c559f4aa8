"""What losses ask of the other ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

Gather = Callable[[Tensor], Sequence[Tensor]]
"""What every rank holds, in the order of ranks; sizes may differ. All ranks must call it."""


def alone(x: Tensor) -> list[Tensor]:
    """The :data:`Gather` of a single rank."""
    return [x]
