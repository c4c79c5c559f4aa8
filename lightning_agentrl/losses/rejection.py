"""Rejection: drop tokens from the loss whose probabilities differ too much between engine and trainer.

The log-ratio of a token is ``log r = old_logps - rollout_logps``: trainer over engine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_agentrl.losses.precision import row_mean, row_sum

RejectionLevel = Literal["token", "sum", "mean", "max"]


@torch.no_grad()
def at_level(x_BT: Tensor, mask_BT: Tensor, level: RejectionLevel) -> Tensor:
    """Return [B, T]: the value of each token, or the sum, mean or maximum over the action tokens of its row.

    Raises:
        ValueError: unknown level.
    """
    if level == "token":
        return x_BT
    if level == "sum":
        return row_sum(x_BT, mask_BT).expand_as(x_BT)
    if level == "mean":
        return row_mean(x_BT, mask_BT).expand_as(x_BT)
    if level == "max":
        lowest = torch.where(mask_BT.bool(), x_BT, -math.inf)
        return (lowest.amax(1, keepdim=True) if x_BT.shape[1] else x_BT).expand_as(x_BT)
    raise ValueError(f"level of a rejection must be one of {', '.join(get_args(RejectionLevel))}, got '{level}'")


@torch.no_grad()
def ratio_inside(log_ratio_BT: Tensor, mask_BT: Tensor, level: RejectionLevel, low: float, high: float) -> Tensor:
    """Return [B, T] bool for the k1 family: ``log low <= log r <= log high`` for the token, sum or mean.

    At the level ``max`` every token of the row must be inside.
    """
    if level == "max":
        highest, lowest = (at_level(x, mask_BT, "max") for x in (log_ratio_BT, -log_ratio_BT))
        return (highest <= math.log(high)) & (-lowest >= math.log(low))
    statistic = at_level(log_ratio_BT, mask_BT, level)
    return (statistic >= math.log(low)) & (statistic <= math.log(high))


@torch.no_grad()
def divergence_below(
    log_ratio_BT: Tensor, mask_BT: Tensor, level: RejectionLevel, kind: Literal["k2", "k3"], bound: float
) -> Tensor:
    """Return [B, T] bool: whether the statistic of ``(log r)^2 / 2`` (k2) or ``r - 1 - log r`` (k3) is within bound."""
    if kind == "k2":
        x_BT = log_ratio_BT.square() / 2
    elif kind == "k3":
        x_BT = torch.expm1(log_ratio_BT) - log_ratio_BT
    else:
        raise ValueError(f"kind of a divergence must be k2 or k3, got '{kind}'")
    return at_level(x_BT, mask_BT, level) <= bound


def _check_level(name: str, level: str) -> None:
    if level not in get_args(RejectionLevel):
        raise ValueError(f"{name}: level must be one of {', '.join(get_args(RejectionLevel))}, got '{level}'")


class Rejection(ABC):
    """Strategy object that decides which action tokens to keep. Several are combined with "and"."""

    @abstractmethod
    def keep(self, log_ratio_BA: Tensor, mask_BA: Tensor) -> Tensor:
        """Return the tokens to keep, [B, A] bool.

        Args:
            log_ratio_BA: log of trainer / engine, 0 off the action mask, within [-20, 20].
            mask_BA: action mask.
        """


class RatioRejection(Rejection):
    """Rejection that keeps tokens, or whole rows, whose ratio of probabilities trainer / engine lies in an interval.

    The defaults reject rows by the geometric mean of their ratios.

    Args:
        level: the ratio of each ``token``, or of the row: ``sum`` multiplies its ratios, ``mean`` takes their geometric
            mean, and ``max`` requires every token to be inside.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    def __init__(self, level: RejectionLevel = "mean", low: float = 0.99, high: float = 1.01) -> None:
        _check_level("RatioRejection", level)
        if not 0 < low < 1 < high:
            raise ValueError(f"RatioRejection: needs 0 < low < 1 < high, got {low} and {high}")
        self.level: RejectionLevel = level
        self.low, self.high = low, high

    def keep(self, log_ratio_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return ratio_inside(log_ratio_BA, mask_BA, self.level, self.low, self.high)


class DivergenceRejection(Rejection):
    """Rejection that keeps tokens, or whole rows, whose divergence between engine and trainer is within a bound.

    Args:
        bound: in nats.
        kind: ``k2`` is half the squared log-ratio, ``k3`` is ratio - 1 - log-ratio.
        level: of each ``token``, or the ``sum``, ``mean`` or ``max`` over the row.
    """

    def __init__(self, bound: float, kind: Literal["k2", "k3"] = "k3", level: RejectionLevel = "token") -> None:
        _check_level("DivergenceRejection", level)
        if kind not in ("k2", "k3"):
            raise ValueError(f"DivergenceRejection: kind must be k2 or k3, got '{kind}'; for k1 use RatioRejection")
        if not bound > 0:
            raise ValueError(f"DivergenceRejection: bound must be above 0, got {bound}")
        self.bound, self.level = bound, level
        self.kind: Literal["k2", "k3"] = kind

    def keep(self, log_ratio_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return divergence_below(log_ratio_BA, mask_BA, self.level, self.kind, self.bound)
