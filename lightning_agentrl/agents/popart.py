"""A critic with PopArt in an iteration: its units follow the returns of each rollout, and its loss is in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps

from torch import Tensor

from lightning_agentrl.models.critic import Critic, popart_head
from lightning_agentrl.types import Rollout


def follow_returns(critic: Critic | None, metrics: Mapping[str, float]) -> dict[str, float]:
    """Let a critic that learns in units of the returns follow those of a rollout; return its units, for the log.

    Args:
        critic: any; others have no units.
        metrics: of the rollout, over all ranks.
    """
    head, std = popart_head(critic), metrics.get("critic/return_std", math.nan)
    if head is None or not math.isfinite(std):
        return {}
    head.follow(metrics["critic/return_mean"], std)
    return {"critic/popart_mean": float(head.mean), "critic/popart_std": float(head.std)}


def in_units_of(
    critic: Critic | None, value_loss: Callable[[Rollout, Tensor], Tensor]
) -> Callable[[Rollout, Tensor], Tensor]:
    """Return the value loss in the units that the critic learns in.

    Args:
        critic: gives the values.
        value_loss: per action token [B, A] of a mini-batch, given the current values [B, A].
    """
    head = popart_head(critic)
    if head is None:
        return value_loss

    @wraps(value_loss)
    def normalized(batch: Rollout, values: Tensor) -> Tensor:
        if batch.scores.values is None or batch.returns is None:
            return value_loss(batch, values)
        scores = replace(batch.scores, values=head.normalize(batch.scores.values))
        batch = replace(batch, scores=scores, returns=head.normalize(batch.returns))
        return value_loss(batch, head.normalize(values))

    return normalized
