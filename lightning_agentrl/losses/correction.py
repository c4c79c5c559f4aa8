"""Off-policy correction, for sampled tokens to which engine and trainer assign different probabilities.

The ratio of a token is the trainer's probability divided by the engine's, ``r = exp(old_logps - rollout_logps)``.
Source: rollout correction, arXiv 2512.23075.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from lightning_agentrl.losses.policy import check_shapes, log_ratio, row_mean, row_sum, same_shape_float32
from lightning_agentrl.types.rollout import Reduce

RejectionLevel = Literal["token", "sum", "mean", "max"]


@torch.no_grad()
def at_level(x_BT: Tensor, mask_BT: Tensor, level: RejectionLevel) -> Tensor:
    """Return, for each token, its value or the sum, mean or maximum over the action tokens of its row: [B, T].

    Raises:
        ValueError: the level is unknown.
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
    """Return a mask [B, T]: ``log low <= log r <= log high`` for the token, or for the sum or mean over its row.

    At the level ``max`` the ratios of all tokens in the row must be inside the bounds.
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
    """Return a mask [B, T]: ``(log r)^2 / 2`` (k2) or ``r - 1 - log r`` (k3), at this level, is at most ``bound``."""
    if kind == "k2":
        x_BT = log_ratio_BT.square() / 2
    elif kind == "k3":
        x_BT = torch.expm1(log_ratio_BT) - log_ratio_BT
    else:
        raise ValueError(f"kind of a divergence must be k2 or k3, got '{kind}'")
    return at_level(x_BT, mask_BT, level) <= bound


class Rejection(ABC):
    """Base class of rejections, which choose the action tokens to keep. Several rejections are combined by ``and``."""

    @abstractmethod
    def keep(self, log_ratio_BA: Tensor, mask_BA: Tensor) -> Tensor:
        """Return a mask [B, A] of the tokens to keep.

        Args:
            log_ratio_BA: log of the ratio trainer / engine, 0 off the action mask, clamped to [-20, 20].
            mask_BA: action mask.
        """


class RatioRejection(Rejection):
    """Rejection that keeps tokens, or whole rows, whose probability ratio trainer / engine is in an interval.

    The defaults reject rows by the geometric mean of their ratios.

    Args:
        level: ``token``: the ratio of each token; ``sum``: the product of a row's ratios; ``mean``: the geometric mean
            of a row's ratios; ``max``: all ratios in the row must be in the interval.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    def __init__(self, level: RejectionLevel = "mean", low: float = 0.99, high: float = 1.01) -> None:
        if not 0 < low < 1 < high:
            raise ValueError(f"RatioRejection: needs 0 < low < 1 < high, got {low} and {high}")
        self.level: RejectionLevel = level
        self.low, self.high = low, high

    def keep(self, log_ratio_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return ratio_inside(log_ratio_BA, mask_BA, self.level, self.low, self.high)


class DivergenceRejection(Rejection):
    """Rejection that keeps tokens, or whole rows, whose divergence between engine and trainer is within a bound.

    Args:
        bound: largest accepted divergence in nats.
        kind: estimator of the divergence: ``k2``: half the squared log-ratio; ``k3``: ratio - 1 - log-ratio.
        level: divergence of each ``token``, or its ``sum``, ``mean`` or ``max`` over the row.
    """

    def __init__(self, bound: float, kind: Literal["k2", "k3"] = "k3", level: RejectionLevel = "token") -> None:
        self.bound, self.level = bound, level
        self.kind: Literal["k2", "k3"] = kind

    def keep(self, log_ratio_BA: Tensor, mask_BA: Tensor) -> Tensor:
        return divergence_below(log_ratio_BA, mask_BA, self.level, self.kind, self.bound)


WeightLevel = Literal["token", "sequence"]


@torch.no_grad()
def masked_log_ratio(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
    """Return ``old_logps - rollout_logps`` clamped to [-20, 20] and 0 off the mask, in float32 or better; any shape.

    Raises:
        ValueError: shapes differ.
    """
    check_shapes(old_logps=old_logps, rollout_logps=rollout_logps, mask=mask)
    old_logps, rollout_logps = same_shape_float32(old_logps=old_logps, rollout_logps=rollout_logps)
    return torch.where(mask.bool(), log_ratio(old_logps, rollout_logps), 0)


@torch.no_grad()
def importance_ratios(log_ratio_BT: Tensor, mask_BT: Tensor, level: WeightLevel) -> Tensor:
    """Return the ratio of each token, or the product of the ratios in its row: [B, T], 0 off the mask.

    Raises:
        ValueError: the level is unknown.
    """
    if level not in get_args(WeightLevel):
        raise ValueError(f"level of importance weights must be token or sequence, got '{level}'")
    logs = log_ratio_BT if level == "token" else row_sum(log_ratio_BT, mask_BT).expand_as(log_ratio_BT)
    return torch.where(mask_BT.bool(), logs.exp(), 0)


@torch.no_grad()
def normalised_weights(weights_BT: Tensor, keep_BT: Tensor, level: WeightLevel, reduce: Reduce | None = None) -> Tensor:
    """Return weights [B, T] divided by their mean over kept tokens of all ranks, or over rows with kept tokens.

    Args:
        weights_BT: weights of the tokens; equal within a row at the level ``sequence``.
        keep_BT: tokens that are not rejected.
        level: whether the mean is over tokens (``token``) or rows (``sequence``).
        reduce: function that sums a small float64 tensor over ranks. None means that there is only one rank.
    """
    keep = keep_BT.bool()
    total = torch.where(keep, weights_BT, 0).double()
    if level == "token":
        sums = torch.stack([total.sum(), keep.sum().double()])
    else:
        sums = torch.stack([row_mean(total, keep).sum(), keep.any(1).sum().double()])
    weight, count = (sums if reduce is None else reduce(sums)).tolist()
    return weights_BT * (count / weight) if weight > 0 else weights_BT  # do not divide by 0 if all weights are 0


@torch.no_grad()
def effective_share(weights_BT: Tensor, mask_BT: Tensor, reduce: Reduce | None = None) -> float:
    """Return the effective sample size as a fraction of all tokens: ``mean(w)^2 / mean(w^2)`` over all ranks, or 0."""
    w_M = weights_BT[mask_BT.bool()].double()
    sums = torch.stack([w_M.new_tensor(float(len(w_M))), w_M.sum(), w_M.square().sum()])
    count, total, squares = (sums if reduce is None else reduce(sums)).tolist()
    return total**2 / (count * squares) if squares > 0 else 0.0


class OffPolicyCorrection(ABC):
    """Base class of corrections, which compute weights and kept tokens from the log-probs of trainer and engine.

    Args:
        rejections: rejections that a token must all pass to be trained on; null: reject nothing.
    """

    bypass: ClassVar[bool] = False  # whether the engine's log-probs replace the old log-probs in the policy loss

    def __init__(self, rejections: list[Rejection] | None = None) -> None:
        self.rejections = rejections or []

    @property
    def needs_old_logps(self) -> bool:
        """Whether the correction requires the trainer's log-probs from before the update."""
        return True

    @torch.no_grad()
    def __call__(
        self, old_logps_BA: Tensor, rollout_logps_BA: Tensor, mask_BA: Tensor, reduce: Reduce | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Compute the weights of the policy loss and the tokens to train on.

        Rejected tokens stay in their rows but count in no loss or denominator.

        Args:
            old_logps_BA: log-probs of the trainer before the update, for all rows of the rollout on this rank.
            rollout_logps_BA: log-probs of the engine that sampled.
            mask_BA: action mask; values off the mask are ignored.
            reduce: function that sums a small float64 tensor over ranks. None means that there is only one rank.

        Returns:
            Weights [B, A] in float32 or better, 0 off the action mask, None if all weights are 1; and a mask [B, A] of
            the kept tokens.

        Raises:
            ValueError: shapes differ.
        """
        log_ratio_BA, keep = masked_log_ratio(old_logps_BA, rollout_logps_BA, mask_BA), mask_BA.bool()
        for rejection in self.rejections:
            keep = keep & rejection.keep(log_ratio_BA, mask_BA)
        return self.weights(log_ratio_BA, mask_BA, keep, reduce), keep

    @abstractmethod
    def weights(
        self, log_ratio_BA: Tensor, mask_BA: Tensor, keep_BA: Tensor, reduce: Reduce | None = None
    ) -> Tensor | None:
        """Return weights [B, A] given masked log-ratios; None if all weights are 1."""


class ImportanceWeights(OffPolicyCorrection):
    """Base class of corrections by importance weights. Subclasses define :meth:`bounded`.

    Args:
        level: ratio of each ``token``, or product of the ratios in its row (``sequence``).
        normalise: whether to divide the weights by their mean over the rollout.
        rejections: rejections that a token must all pass to be trained on; null: reject nothing.
    """

    def __init__(self, level: WeightLevel, normalise: bool, rejections: list[Rejection] | None) -> None:
        super().__init__(rejections)
        self.level: WeightLevel = level
        self.normalise = normalise

    def weights(self, log_ratio_BA: Tensor, mask_BA: Tensor, keep_BA: Tensor, reduce: Reduce | None = None) -> Tensor:
        weights = self.bounded(importance_ratios(log_ratio_BA, mask_BA, self.level))
        return normalised_weights(weights, keep_BA, self.level, reduce) if self.normalise else weights

    @abstractmethod
    def bounded(self, ratios_BA: Tensor) -> Tensor:
        """Return weights [B, A] given ratios [B, A], which are 0 off the mask."""


class TruncatedWeights(ImportanceWeights):
    """Importance weights with an upper bound: ``min(r, cap)``.

    Args:
        level: ratio of each ``token``, or product of the ratios in its row (``sequence``).
        cap: upper bound of a weight.
        normalise: whether to divide the weights by their mean over the rollout.
        rejections: rejections that a token must all pass to be trained on; null: reject nothing.
    """

    def __init__(
        self,
        level: WeightLevel = "token",
        cap: float = 2.0,
        normalise: bool = False,
        rejections: list[Rejection] | None = None,
    ) -> None:
        super().__init__(level, normalise, rejections)
        if not cap >= 1:
            raise ValueError(f"TruncatedWeights: cap must be at least 1, got {cap}")
        self.cap = cap

    def bounded(self, ratios_BA: Tensor) -> Tensor:
        return ratios_BA.clamp_max(self.cap)


class IcePop(ImportanceWeights):
    """Importance weights that are 0 outside an interval. Tokens with weight 0 still count in denominators.

    Args:
        level: ratio of each ``token``, or product of the ratios in its row (``sequence``).
        low: lower end of the interval.
        high: upper end of the interval.
        normalise: whether to divide the weights by their mean over the rollout.
        rejections: rejections that a token must all pass to be trained on; null: reject nothing.
    """

    def __init__(
        self,
        level: WeightLevel = "token",
        low: float = 0.5,
        high: float = 5.0,
        normalise: bool = False,
        rejections: list[Rejection] | None = None,
    ) -> None:
        super().__init__(level, normalise, rejections)
        if not 0 <= low < 1 < high:
            raise ValueError(f"IcePop: needs 0 <= low < 1 < high, got {low} and {high}")
        self.low, self.high = low, high

    def bounded(self, ratios_BA: Tensor) -> Tensor:
        return torch.where((ratios_BA >= self.low) & (ratios_BA <= self.high), ratios_BA, 0)


class RejectOnly(OffPolicyCorrection):
    """Rejection without importance weights: kept tokens have weight 1.

    Args:
        rejections: rejections that a token must all pass to be trained on; null: ``RatioRejection`` with its defaults,
            which rejects rows by the geometric mean of their ratios.
    """

    def __init__(self, rejections: list[Rejection] | None = None) -> None:
        super().__init__([RatioRejection()] if rejections is None else rejections)

    def weights(self, log_ratio_BA: Tensor, mask_BA: Tensor, keep_BA: Tensor, reduce: Reduce | None = None) -> None:
        return None


class Bypass(OffPolicyCorrection):
    """Use the engine's log-probs as old log-probs of the policy loss, so that the loss's ratio is the correction.

    There are no additional weights, since these would correct twice. Without rejections the trainer does not compute
    old log-probs.

    Args:
        rejections: rejections that a token must all pass to be trained on; rejections require the trainer's log-probs.
    """

    bypass: ClassVar[bool] = True

    @property
    def needs_old_logps(self) -> bool:
        return bool(self.rejections)

    def weights(self, log_ratio_BA: Tensor, mask_BA: Tensor, keep_BA: Tensor, reduce: Reduce | None = None) -> None:
        return None


class NoCorrection(OffPolicyCorrection):
    """No correction. Use it to disable ``TruncatedWeights``, the default for rollouts collected ahead."""

    def __init__(self) -> None:
        super().__init__()

    @property
    def needs_old_logps(self) -> bool:
        return False

    def weights(self, log_ratio_BA: Tensor, mask_BA: Tensor, keep_BA: Tensor, reduce: Reduce | None = None) -> None:
        return None
