"""The base class of policy losses. Each family has a separate file."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lightning_agentrl.losses.aggregation import AggregationMode, check_aggregation
from lightning_agentrl.types.rollout import Gather, alone

LIMIT = 20.0  # bound of log-ratios, so that their exponentials stay finite


def same_shape_float32(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in their common dtype, at least float32.

    Raises:
        ValueError: shapes differ. Broadcasting [B] against [B, A] would silently give wrong results.
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
    """Return ``logps - old_logps`` clamped to [-20, 20], without gradient for ``old_logps``."""
    return (logps - old_logps.detach()).clamp(-LIMIT, LIMIT)


def row_sum(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the sum [B, 1] over each row's tokens on the mask; other values are ignored."""
    return torch.where(mask_BT.bool(), x_BT, 0).sum(1, keepdim=True)


def row_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean [B, 1] over each row's tokens on the mask, 0 for rows without such tokens."""
    return row_sum(x_BT, mask_BT) / mask_BT.bool().sum(1, keepdim=True).clamp_min(1)


def check_share(name: str, share: float) -> None:
    """Raise a ValueError that begins with ``name`` unless the share is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise ValueError(f"{name}: share must be above 0 and at most 1, got {share}")


def count_of(share: float, count: int) -> int:
    """Return ``max(1, floor(share * count))``, tolerant to products slightly below an integer by rounding."""
    return max(1, math.floor(share * count + 1e-9))


KEY = "model.init_args.policy_loss"


class PolicyLoss(ABC):
    """Base class of policy losses, which compute a loss per action token from log-probs and advantages.

    Subclasses define :meth:`token_loss`. Class attributes set the default aggregation and declare what the agent must
    compute.

    Args:
        aggregation: average of the loss over a mini-batch; None: the default of the class.
        norm_tokens: constant length by which ``seq-mean-token-sum-norm`` divides, such as the longest reply in tokens.
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
            logps_BA: log-probs of the sampled tokens under the current policy, with gradients.
            old_logps_BA: log-probs at the start of the update; constants.
            advantages_BA: advantages; constants.
            mask_BA: tokens that count; values off the mask affect neither the loss nor its gradient.
            picked_BA: result of :meth:`pick` for these rows, if the loss needs it.

        Returns:
            Loss [B, A] in float32 or better, 0 off the mask.

        Raises:
            ValueError: shapes of the arguments or of the loss differ.
            TypeError: the result of :meth:`token_loss` does not depend on the log-probs; the message names the class.
        """
        logps, old_logps, advantages, mask = counted(logps_BA, old_logps_BA, advantages_BA, mask_BA)
        loss = self.token_loss(logps, old_logps, advantages, mask)
        check_shapes(token_loss=loss, mask=mask)
        if logps.requires_grad and torch.is_grad_enabled() and not loss.requires_grad and loss[mask].any():
            raise TypeError(
                f"token_loss of {type(self).__name__} returns numbers that do not depend on the log-probs, so nothing "
                f"can be learned from them (key {KEY})"
            )
        return torch.where(mask, loss, 0)

    @abstractmethod
    def token_loss(self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor) -> Tensor:
        """Return the loss [B, A], with any values off the mask.

        Arguments are as in :meth:`__call__`, converted to one dtype and set to 0 off the mask.
        """

    def pick(
        self,
        logps_BA: Tensor,
        old_logps_BA: Tensor,
        advantages_BA: Tensor,
        mask_BA: Tensor,
        noise_BA: Tensor,
        gather: Gather = alone,
    ) -> Tensor:
        """Return a mask [B, A] of tokens that the loss treats differently, chosen from a whole mini-batch.

        Args:
            logps_BA: log-probs under the current policy, for all rows of the mini-batch on this rank.
            old_logps_BA: log-probs at the start of the update.
            advantages_BA: advantages.
            mask_BA: tokens that count.
            noise_BA: random numbers in [0, 1), which do not depend on the rank of a token.
            gather: function that gathers a tensor from all ranks, to choose tokens among those of all ranks.
        """
        return torch.zeros_like(mask_BA, dtype=torch.bool)

    def metrics(
        self, logps_BA: Tensor, old_logps_BA: Tensor, advantages_BA: Tensor, mask_BA: Tensor
    ) -> dict[str, Tensor]:
        """Return numbers per token [B, A] by name; their means over the tokens that count are logged."""
        return {}


def counted(
    logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of a policy loss in one dtype and 0 off the mask, the constants without gradient.

    Arguments are masked before the loss is computed: a NaN off the mask would otherwise reach the gradient as
    ``0 * NaN``.
    """
    check_shapes(logps=logps, old_logps=old_logps, advantages=advantages, mask=mask)
    logps, old_logps, advantages = same_shape_float32(logps=logps, old_logps=old_logps, advantages=advantages)
    mask = mask.bool()
    constants = torch.where(mask, old_logps.detach(), 0), torch.where(mask, advantages.detach(), 0)
    return torch.where(mask, logps, 0), *constants, mask
