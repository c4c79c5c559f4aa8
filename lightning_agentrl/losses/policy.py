"""The base class of policy losses. Each family has a separate file."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.losses.aggregation import AggregationMode, check_aggregation
from lightning_agentrl.types.rollout import Gather, alone

LIMIT = 20.0  # of log-ratios, so that their exponentials stay finite


def same_shape_float32(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common dtype, at least float32.

    Raises:
        ValueError: shapes differ. Broadcasting [B] against [B, A] would silently give a wrong number.
    """
    check_shapes(**tensors)
    dtype = torch.float32
    for x in tensors.values():
        dtype = torch.promote_types(dtype, x.dtype)
    return tuple([x.to(dtype) for x in tensors.values()])


def check_shapes(**tensors: Tensor) -> None:
    """Raise a ValueError with the shapes if they differ."""
    if len({x.shape for x in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise ValueError(f"expected tensors of one shape, got {shapes}")


def log_ratio(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return ``logps - old_logps``, the latter a constant, clamped to [-20, 20]."""
    return (logps - old_logps.detach()).clamp(-LIMIT, LIMIT)


def row_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum [B, 1] over the tokens on the mask of each row; other values are not read."""
    return torch.where(mask_BT.bool(), x_BT, 0).sum(1, keepdim=True)


def row_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean [B, 1] over the tokens on the mask of each row, 0 for rows without any."""
    return row_sum(x_BT, mask_BT) / mask_BT.bool().sum(1, keepdim=True).clamp_min(1)


def check_share(name: str, share: float) -> None:
    """Raise a ValueError that begins with ``name`` unless the share is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ValueError(f"{name}: share must be above 0 and at most 1, got {share}")


def count_of(share: float, count: int) -> int:
    """Return ``max(1, floor(share * count))``; a product that rounding puts just below an integer counts as it."""
    return max(1, math.floor(share * count + 1e-9))


KEY = "model.init_args.policy_loss"


class PolicyLoss(ABC):
    """Strategy object that turns log-probs and advantages into a loss per action token.

    Subclasses define :meth:`token_loss`.

    Class attributes say how it is averaged by default and what the agent must compute for it.

    Args:
        aggregation: how the loss is averaged over a mini-batch; None: the default of the class.
        norm_tokens: constant length by which ``seq-mean-token-sum-norm`` divides, such as the longest reply.
    """

    aggregation: AggregationMode = "token-mean"
    norm_tokens: int | None = None
    needs_mini_batch_logps: ClassVar[bool] = False  # `pick` needs the current log-probs of the whole mini-batch

    def __init__(self, aggregation: AggregationMode | None = None, norm_tokens: int | None = None) -> None:
        if aggregation is not None:
            self.aggregation = aggregation
        self.norm_tokens = norm_tokens
        check_aggregation(self.aggregation, norm_tokens)

    def __call__(
        self,
        logps_BA: Tensor,
        old_logps_BA: Tensor,
        advantages_BA: Tensor,
        mask_BA: Tensor,
        picked_BA: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss per token, before any averaging.

        Args:
            logps_BA: log-probs of the sampled tokens under the current policy, with gradient.
            old_logps_BA: at the start of the update; a constant.
            advantages_BA: constants.
            mask_BA: tokens that count. Values off the mask affect neither the loss nor its gradient.
            picked_BA: what :meth:`pick` returned for these rows, if the loss needs it.

        Returns:
            [B, A] in float32 or better, 0 off the mask.

        Raises:
            ValueError: shapes differ, also that of the loss, or the picked tokens are missing.
            TypeError: what :meth:`token_loss` returned does not depend on the log-probs; names the class.
        """
        logps, old_logps, advantages, mask = counted(logps_BA, old_logps_BA, advantages_BA, mask_BA)
        loss = self.token_loss(logps, old_logps, advantages, mask)
        check_shapes(token_loss=loss, mask=mask)
        if logps.requires_grad and torch.is_grad_enabled() and not loss.requires_grad and loss[mask].any():
            raise TypeError(
                f"token_loss of {type(self).__name__} returns numbers that do not depend on the log-probs, so nothing "
                f"would be learnt from them (key {KEY})"
            )
        return torch.where(mask, loss, 0)

    @abstractmethod
    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        """Return the loss [B, A] of arguments that share a dtype and are 0 off the mask; undefined off the mask."""

    def pick(
        self,
        logps_BA: Tensor,
        old_logps_BA: Tensor,
        advantages_BA: Tensor,
        mask_BA: Tensor,
        noise_BA: Tensor,
        gather: Gather = alone,
    ) -> Tensor:
        """Choose tokens [B, A] (bool) of a whole mini-batch that the loss treats differently, before its optimizer
        step.

        Args:
            logps_BA: as in a call, for all rows of the mini-batch on this rank.
            old_logps_BA: as in a call.
            advantages_BA: as in a call.
            mask_BA: as in a call.
            noise_BA: random numbers in [0, 1), the same for a token whatever rank it is on.
            gather: returns the tensors of all ranks, since tokens are picked among all of them.
        """
        return torch.zeros_like(mask_BA, dtype=torch.bool)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Return per-token numbers, of which the means over the tokens that count are logged."""
        return {}


def counted(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of a policy loss in one dtype, 0 off the mask, the constants without gradient.

    Masking comes first: masked afterwards, a NaN in the padding would reach the gradient through ``0 * NaN``.
    """
    check_shapes(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask)
    logps, old_logps, advantages = same_shape_float32(logps=logps, old_logps=old_logps, advantages=advantages)
    mask = mask.bool()
    constants = torch.where(mask, old_logps.detach(), 0), torch.where(mask, advantages.detach(), 0)
    return torch.where(mask, logps, 0), *constants, mask
