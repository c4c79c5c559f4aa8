"""Quantities by which the page colors reply tokens, each on one scale for the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_agentrl.run_files import LoggedTurn

_TAIL = 2.0  # percentage of tokens at each end with the strongest color, to limit outliers


@dataclass(frozen=True)
class Quantity:
    """A number per reply token: a list in the log, or the difference of two lists."""

    name: str
    plus: str  # key of the list
    minus: str | None  # key of the list to subtract
    signed: bool  # whether to use two colors around zero, or one from pale to strong
    absent: str  # reason why a run may lack the quantity
    low_is_strong: bool = False

    def of(self, turn: LoggedTurn) -> list[float] | None:
        """Return one number per reply token, NaN for non-finite numbers; None if the turn lacks a list."""
        values, other = turn.get(self.plus), turn.get(self.minus) if self.minus else None
        if values is None or (self.minus and other is None):
            return None
        pairs = zip(values, other or [0.0] * len(values), strict=True)
        return [math.nan if a is None or b is None else a - b for a, b in pairs]

    def scale(self, turns: Sequence[LoggedTurn]) -> dict[str, Any]:
        """Return the names, color limits ``low`` and ``high``, and extremes, or the reason of its absence."""
        entry: dict[str, Any] = {
            "name": self.name,
            "plus": self.plus,
            "minus": self.minus,
            "signed": self.signed,
            "strongLow": self.low_is_strong,
        }
        numbers = np.fromiter(self._all(turns), dtype=np.float64)
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            return {**entry, "absent": self.absent}
        if self.signed:
            high = float(np.percentile(np.abs(numbers), 100 - _TAIL)) or float(np.abs(numbers).max()) or 1.0
            low = -high
        else:
            low, high = (float(x) for x in np.percentile(numbers, (_TAIL, 100 - _TAIL)))
        return {**entry, "low": low, "high": high, "min": float(numbers.min()), "max": float(numbers.max())}

    def _all(self, turns: Sequence[LoggedTurn]) -> Iterator[float]:
        for turn in turns:
            yield from self.of(turn) or ()


QUANTITIES = (
    Quantity("advantage", "advantages", None, signed=True, absent="not estimated"),
    Quantity("value", "values", None, signed=False, absent="no critic"),
    Quantity("entropy", "entropy", None, signed=False, absent="not scored"),
    Quantity("KL to reference", "old_logps", "ref_logps", signed=True, absent="no reference model"),
    Quantity("log-prob gap", "old_logps", "rollout_logps", signed=True, absent="not scored"),
    Quantity("log-prob", "rollout_logps", None, signed=False, absent="not logged", low_is_strong=True),
)
