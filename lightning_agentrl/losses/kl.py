"""KL to the reference: estimators per token, and coefficients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

KLKind = Literal["k1", "abs", "k2", "k3"]


def kl_estimate(logps: Tensor, ref_logps: Tensor, kind: KLKind = "k1") -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token (Schulman's k1, k2, k3, or the absolute log-ratio)."""
    d = logps - ref_logps
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        return ((-d).clamp(-20.0, 20.0).exp() + d - 1).clamp(-10.0, 10.0)
    raise ValueError(f"kl kind must be k1, abs, k2 or k3, got '{kind}'")


class KLCoefficient(ABC):
    """Strategy object: the weight of the KL in the reward."""

    value: float

    @abstractmethod
    def update(self, kl: float, turns: int) -> None:
        """Take the mean KL per token of a rollout of so many turns."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class FixedKL(KLCoefficient):
    """A constant coefficient."""

    def __init__(self, value: float = 0.001) -> None:
        if value < 0:
            raise ValueError(f"the KL coefficient must not be negative, got {value}")
        self.value = float(value)

    def update(self, kl: float, turns: int) -> None:
        """Stays as it is."""


class AdaptiveKL(KLCoefficient):
    """Steers the KL to a target (Ziegler et al. 2019, arXiv 1909.08593).

    Args:
        value: first coefficient.
        target: wanted mean KL per token.
        horizon: turns over which an error of 100 % would double the coefficient; errors are clipped at 20 %.
    """

    def __init__(self, value: float = 0.001, target: float = 0.1, horizon: int = 10_000) -> None:
        if value <= 0 or target <= 0 or horizon < 1:
            raise ValueError(f"AdaptiveKL needs positive numbers, got {value=}, {target=}, {horizon=}")
        self.value = float(value)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, turns: int) -> None:
        """Multiply by ``1 + clip(kl / target - 1, -0.2, 0.2) * turns / horizon``."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * turns / self.horizon
