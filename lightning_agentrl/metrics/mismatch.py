"""Log-prob mismatch between engine and trainer, and how much of it rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

# Accepted multiples of the policy's own rounding error, since the engine also rounds, at other operations. Measured
# with vLLM and a 135M model with large errors: 1.2 to 1.3 times the mean, 1.0 to 1.5 times the largest.
TIMES_MEAN, TIMES_LARGEST = 2.0, 3.0
MOST_MEAN, MOST_LARGEST = 0.5, 8.0  # nats; larger errors are never attributed to rounding, but to a faulty trainer
UNLIKELY = 7.0  # largest accepted deviation of sampled tokens from expected log-probs, in standard deviations
UNSEEN = 5.0  # nats; a rare token that was not sampled is about this much less likely than the average token


@dataclass(frozen=True)
class Bounds:
    """The largest mismatch of log-probs, in nats, that rounding can explain."""

    mean: float
    largest: float  # largest mismatch over several hundred tokens

    def __str__(self) -> str:
        return f"mean {self.mean:g}, largest {self.largest:g}"


EXACT = Bounds(1e-4, 1e-3)  # engine and trainer compute in float32 or better
ROUGH = Bounds(0.1, 0.8)  # engine or trainer computes in 16 bits


def bounds_for(*dtypes: str) -> Bounds:
    """Return the bounds for the dtypes, by name, in which engine and trainer compute."""
    return ROUGH if any("16" in dtype for dtype in dtypes) else EXACT


@dataclass(frozen=True)
class Comparison:
    """Log-probs (nats) of engine and trainer for the same N sampled tokens.

    Args:
        engine: log-probs [N] that the engine reported.
        trainer: log-probs [N] of the trainer.
        entropy: entropies [N] of the trainer's distributions.
        bounds: largest mismatch that rounding explains for both dtypes.
        rounding: absolute differences [N] of the trainer's log-probs to those that it computes in another precision;
            None: not measured.
    """

    engine: Tensor
    trainer: Tensor
    entropy: Tensor
    bounds: Bounds
    rounding: Tensor | None = None

    @property
    def mismatch(self) -> Tensor:
        """Absolute differences of the log-probs [N]."""
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
        """Whether rounding can explain the mismatch; False if a log-prob is NaN."""
        return self.mean <= self.allowed.mean and self.largest <= self.allowed.largest

    @property
    def surprise(self) -> float:
        """How much more likely the sampled tokens are than tokens drawn from the trainer, in standard deviations.

        The expected log-prob of a token drawn from a distribution is minus its entropy, so the sum of the differences
        is a martingale. This test detects sampling that cuts off unlikely tokens (such as top-p), even if the engine
        reports log-probs of the whole distribution.

        The standard deviation is estimated from the sampled tokens and one artificial token with a difference of
        ``UNSEEN``. Without this artificial token, rounding would look significant if all tokens are equally likely, and
        so would the absence of other tokens if one token is nearly certain.
        """
        excess = self.trainer.double() + self.entropy.double()
        return float(excess.sum()) / math.sqrt(float(excess.square().sum()) + UNSEEN**2)

    @property
    def fits(self) -> bool:
        """Whether the engine reports the trainer's log-probs and samples its tokens from them."""
        return self.logps_fit and abs(self.surprise) <= UNLIKELY

    def __str__(self) -> str:
        numbers = f"{len(self.engine)} tokens, log-prob mismatch largest {self.largest:.2g}, mean {self.mean:.2g}"
        if abs(self.surprise) <= UNLIKELY:
            return numbers
        return f"{numbers}, sampled tokens {self.surprise:+.0f} standard deviations more likely than the policy's"
