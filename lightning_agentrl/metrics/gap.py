"""The gap of log-probs between engine and trainer: what rounding explains, and a watch over the gaps of a run."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

JUMP = 5.0  # times the median of the gaps before, beyond which a gap is told
REMEMBERED = 8  # gaps
# Times the policy's own rounding error: the engine rounds too, elsewhere. Measured with vLLM and a model of 135M whose
# errors are large: 1.2 to 1.3 times the mean, 1.0 to 1.5 times the largest.
TIMES_MEAN, TIMES_LARGEST = 2.0, 3.0
MOST_MEAN, MOST_LARGEST = 0.5, 8.0  # beyond which no rounding is believed: the trainer itself may be at fault


@dataclass(frozen=True)
class Bounds:
    """The largest gaps of log-probs, in nats, that rounding explains."""

    mean: float
    largest: float  # of some hundred tokens

    def widened(self, mean: float, largest: float) -> Bounds:
        """Return bounds that also hold what a policy of these own rounding errors explains.

        Args:
            mean: distance of its log-probs in two precisions. What is not finite explains nothing.
            largest: such distance.
        """
        if not (math.isfinite(mean) and math.isfinite(largest)):
            return self
        mean, largest = min(TIMES_MEAN * mean, MOST_MEAN), min(TIMES_LARGEST * largest, MOST_LARGEST)
        return Bounds(max(self.mean, mean), max(self.largest, largest))

    def hold(self, mean: float, largest: float) -> bool:
        """Return whether both are within the bounds; NaN is not."""
        return mean <= self.mean and largest <= self.largest

    def __str__(self) -> str:
        return f"mean {self.mean:g} and largest {self.largest:g}"


EXACT = Bounds(1e-4, 1e-3)  # both compute in float32 or better
ROUGH = Bounds(0.1, 0.8)  # one of them computes in 16 bits


def bounds_for(*dtypes: str) -> Bounds:
    """Return the bounds for the dtypes in which engine and trainer compute, by name."""
    return ROUGH if any("16" in dtype for dtype in dtypes) else EXACT


class GapWatch:
    """A watch over the mean gap of each rollout. Of rollouts alone the mean counts: the largest grows with their size.

    Args:
        bounds: of rollouts that the weights of their scores have sampled.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._before: dict[bool, deque[float]] = {older: deque(maxlen=REMEMBERED) for older in (False, True)}
        self.usual = float("nan")  # median of the rollouts of the same kind before the last one

    def judge(self, mean: float, older: bool) -> Literal["", "jump", "beyond"]:
        """Return what is wrong with the mean gap of the next rollout, and remember it.

        Args:
            mean: of all tokens. One that is not a number has no judgement here: such steps are not taken anyway.
            older: some of its turns are sampled with older weights. Their gap also holds what the steps in between have
                changed, so it is measured against other such rollouts before.
        """
        if mean != mean:
            return ""
        before = self._before[older]
        self.usual = statistics.median(before) if before else mean
        before.append(mean)
        if not older and mean > self.bounds.mean:
            return "beyond"
        return "jump" if mean > max(JUMP * self.usual, self.bounds.mean / 10) else ""
