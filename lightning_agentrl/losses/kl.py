"""KL to the reference policy: estimators per token, and coefficients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses.policy import log_ratio, same_shape_float32

KLKind = Literal["k1", "abs", "k2", "k3"]
KLLossKind = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]


def kl_estimate(logps: Tensor, ref_logps: Tensor, kind: KLKind = "k1") -> Tensor:
    """Estimate KL(policy || reference) at each sampled token, in nats (J. Schulman, "Approximating KL divergence").

    With ``d = logps - ref_logps``: ``k1``: d; ``abs``: the absolute value of d; ``k2``: d²/2; ``k3``: exp(-d) + d - 1
    with the exponent clamped to [-20, 20] and the value to [-10, 10]. k1 is unbiased. k3 is unbiased unless the value
    of a token reaches the bound of 10, as for tokens that are 14 times as likely under the reference. As a loss, only
    k2 has the gradient of the KL.

    Args:
        logps: log-probs of the sampled tokens, any shape.
        ref_logps: log-probs under the reference, same shape.
        kind: name of the estimator.

    Returns:
        Estimates of the same shape, float32 or better.

    Raises:
        ValueError: the kind is unknown, or shapes differ.
    """
    logps, ref_logps = same_shape_float32(logps=logps, ref_logps=ref_logps)
    d = logps - ref_logps
    if kind == "k1":
        return d
    if kind == "abs":
        return d.abs()
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        # Use expm1, since for small d the result d²/2 would be lost in the rounding of exp(-d).
        return (torch.expm1((-d).clamp(-20.0, 20.0)) + d).clamp(-10.0, 10.0)
    raise ValueError(f"kl kind must be k1, abs, k2 or k3, got '{kind}'")


def kl_loss(logps: Tensor, old_logps: Tensor, ref_logps: Tensor, kind: KLLossKind = "k3+") -> Tensor:
    """Return KL(policy || reference) as a loss at each sampled token, for tokens that the old policy sampled.

    The loss is :func:`kl_estimate` times the importance ratio ``sg(exp(logps - old_logps))``. ``k1+`` and ``k3+`` have
    the value of k1 and k3 and the gradient of k2, the only one that has the gradient of the KL.

    Args:
        logps: log-probs of the sampled tokens, any shape.
        old_logps: log-probs under the policy that sampled, same shape; constants.
        ref_logps: log-probs under the reference, same shape; constants.
        kind: name of the estimator.

    Returns:
        Loss of the same shape, float32 or better.

    Raises:
        ValueError: the kind is unknown, or shapes differ.
    """
    logps, old_logps, ref_logps = same_shape_float32(logps=logps, old_logps=old_logps, ref_logps=ref_logps)
    ref_logps = ref_logps.detach()
    if kind == "k1+" or kind == "k3+":
        slope = kl_estimate(logps, ref_logps, "k2")
        kl = kl_estimate(logps.detach(), ref_logps, "k1" if kind == "k1+" else "k3") + (slope - slope.detach())
    else:
        kl = kl_estimate(logps, ref_logps, kind)
    return log_ratio(logps.detach(), old_logps).exp() * kl


class KLCoefficient(ABC):
    """Base class of coefficients for the KL in the reward."""

    value: float

    @abstractmethod
    def update(self, kl: float, turns: int) -> None:
        """Adjust the coefficient after a rollout.

        Args:
            kl: mean KL per token over all ranks, in nats.
            turns: number of turns over all ranks.
        """

    def check_turns(self, turns: int) -> None:
        """Raise a ConfigError if rollouts with this number of turns are not supported. By default, all are."""
        return

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class FixedKL(KLCoefficient):
    """A constant coefficient. The configured value is used even if a checkpoint that is resumed has another value.

    Args:
        value: the coefficient.
    """

    def __init__(self, value: float = 0.001) -> None:
        if not 0 <= value < math.inf:
            raise ValueError(f"FixedKL: value must not be negative, got {value}")
        self.value = float(value)

    def update(self, kl: float, turns: int) -> None:
        """Do nothing, since the coefficient is constant."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Do nothing, since the configured value is used."""


class AdaptiveKL(KLCoefficient):
    """An adaptive coefficient that controls the KL to a target (Ziegler et al. 2019, arXiv 1909.08593).

    A resumed run continues with the coefficient in the checkpoint; a new run starts with the initial coefficient.

    Args:
        value: initial coefficient.
        target: desired mean KL per token, in nats.
        horizon: number of turns in which a relative error of 1 would double the coefficient.
        clip: bound of the relative error of the KL, as a fraction of the target.
    """

    def __init__(self, value: float = 0.001, target: float = 0.1, horizon: int = 10_000, clip: float = 0.2) -> None:
        for name, number in {"value": value, "target": target, "horizon": horizon, "clip": clip}.items():
            if not 0 < number < math.inf:
                raise ValueError(f"AdaptiveKL: {name} must be above 0, got {number}")
        self.value = float(value)
        self.target, self.horizon, self.clip = target, horizon, clip

    def update(self, kl: float, turns: int) -> None:
        """Multiply by ``1 + clip(kl / target - 1, -clip, clip) * turns / horizon``, bounded to [0.5, 1.5].

        The bounds are not in the paper: with groups of long episodes, many turns could make the factor negative.

        Raises:
            ValueError: the KL is NaN.
        """
        if math.isnan(kl):
            raise ValueError("AdaptiveKL got a KL of NaN; the log-probs of the rollout contain NaN")
        error = min(max(kl / self.target - 1.0, -self.clip), self.clip)
        self.value *= 1.0 + min(max(error * turns / self.horizon, -0.5), 0.5)

    def check_turns(self, turns: int) -> None:
        if not 0 <= self.clip * turns < self.horizon:
            raise ConfigError(
                f"AdaptiveKL: {turns} turns per update need a horizon above {self.clip * turns:g}, got {self.horizon}; "
                "change model.init_args.kl.reward.init_args.horizon"
            )
