"""Metrics of one scored rollout's action tokens, as sums that can be added over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.metrics.numbers import Number, masked_mean
from lightning_agentrl.types import Rollout


def token_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return means over action tokens, the KL also by part of the reply; what was not scored is left out."""
    scores, mask = rollout.scores, rollout.action_mask
    numbers: dict[str, Number] = {}
    if scores.entropy is not None:
        numbers["rollout/entropy"] = masked_mean(scores.entropy, mask)
    if scores.old_logps is None:
        return numbers
    if scores.ref_logps is not None:
        log_ratio = scores.old_logps - scores.ref_logps
        thought = thought_mask(rollout)
        numbers["kl/reference"] = masked_mean(log_ratio, mask)
        numbers["kl/thought"] = masked_mean(log_ratio, mask & thought)
        numbers["kl/action"] = masked_mean(log_ratio, mask & ~thought)
    return numbers


def thought_mask(rollout: Rollout) -> Tensor:
    """Return [B, A] bool: action tokens that are part of a thought, not of the part that names the action."""
    thought = torch.zeros_like(rollout.action_mask)
    for row, sample in enumerate(rollout.samples):
        for one in sample.placed_turns():
            first = one.columns.start
            thought[row, first : first + one.turn.thought_tokens] = True
    return thought
