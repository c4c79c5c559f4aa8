"""Log-prob mismatch between engine and trainer, and how much of it rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

# Multiples of the policy's own rounding error: the engine rounds too, in other places. Measured with vLLM and a model
# of 135M whose errors are large: 1.2 to 1.3 times the mean, 1.0 to 1.5 times the largest.
TIMES_MEAN, TIMES_LARGEST = 2.0, 3.0
MOST_MEAN, MOST_LARGEST = 0.5, 8.0  # beyond which no rounding is believed: the trainer itself may be at fault
UNLIKELY = 7.0  # standard deviations by which sampled tokens may be more or less likely than expected
UNSEEN = 5.0  # nats; a rare token that was not sampled is about this much less likely than the average one


@dataclass(frozen=True)
class Bounds:
    """The largest mismatch of log-probs, in nats, that rounding explains."""

    mean: float
    largest: float  # of some hundred tokens

    def __str__(self) -> str:
        return f"mean {self.mean:g}, largest {self.largest:g}"


EXACT = Bounds(1e-4, 1e-3)  # both compute in float32 or better
ROUGH = Bounds(0.1, 0.8)  # one of them computes in 16 bits


def bounds_for(*dtypes: str) -> Bounds:
    """Return the bounds for the dtypes in which engine and trainer compute, by name."""
    return ROUGH if any("16" in dtype for dtype in dtypes) else EXACT


@dataclass(frozen=True)
class Comparison:
    """Log-probs (nats) of engine and trainer for the same N sampled tokens.

    Args:
        engine: [N] log-probs that the engine reported.
        trainer: [N] log-probs of the trainer.
        entropy: [N] of the trainer's distributions.
        bounds: what rounding explains for the two dtypes.
        rounding: [N] distance of the trainer's log-probs to its own in another precision; None: not measured.
    """

    engine: Tensor
    trainer: Tensor
    entropy: Tensor
    bounds: Bounds
    rounding: Tensor | None = None

    @property
    def mismatch(self) -> Tensor:
        """[N] distances."""
        return (self.engine.double() - self.trainer.double()).abs()

    @property
    def mean(self) -> float:
        return float(self.mismatch.mean())

    @property
    def largest(self) -> float:
        return float(self.mismatch.max())

    @property
    def allowed(self) -> Bounds:
        """The bounds, widened for a policy whose own rounding error is large."""
        if self.rounding is None or not self.rounding.isfinite().all():
            return self.bounds
        mean = min(TIMES_MEAN * float(self.rounding.mean()), MOST_MEAN)
        largest = min(TIMES_LARGEST * float(self.rounding.max()), MOST_LARGEST)
        return Bounds(max(self.bounds.mean, mean), max(self.bounds.largest, largest))

    @property
    def logps_fit(self) -> bool:
        """Whether rounding explains the mismatch; False if a log-prob is NaN."""
        return self.mean <= self.allowed.mean and self.largest <= self.allowed.largest

    @property
    def surprise(self) -> float:
        """Standard deviations by which the sampled tokens are more likely than tokens drawn from the trainer.

        The log-prob of a token drawn from a distribution is minus its entropy on average, so the sum of their
        differences is a martingale. Sampling that cuts off unlikely tokens shows here, even if the engine reports the
        log-probs of the whole distribution.

        The standard deviation is estimated from the sampled tokens and one more with a difference of ``UNSEEN``.
        Without that one, rounding would look significant if all tokens are equally likely, and so would the lack of all
        other tokens if one is nearly certain.
        """
        excess = self.trainer.double() + self.entropy.double()
        return float(excess.sum()) / math.sqrt(float(excess.square().sum()) + UNSEEN**2)

    @property
    def fits(self) -> bool:
        """Whether the engine reports the trainer's log-probs and draws its tokens from them."""
        return self.logps_fit and abs(self.surprise) <= UNLIKELY

    def __str__(self) -> str:
        numbers = f"{len(self.engine)} tokens, log-prob mismatch largest {self.largest:.2g}, mean {self.mean:.2g}"
        if abs(self.surprise) <= UNLIKELY:
            return numbers
        return f"{numbers}, sampled tokens {self.surprise:+.0f} standard deviations more likely than the policy's"
