"""Mismatch of engine and trainer on the sampled tokens, as sums that can be added over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_agentrl.metrics.numbers import Max, Number, masked_mean
from lightning_agentrl.types import Rollout

LIMIT = 20.0  # of log-ratios and of their sums over a sample


def mismatch_numbers(rollout: Rollout) -> dict[str, Number]:
    """Compare the trainer's log-probs from before the update with the engine's; empty if they were not computed.

    ``mismatch/rejected`` and ``mismatch/weight`` show the effect of a correction.
    """
    mask = rollout.action_mask
    numbers: dict[str, Number] = {}
    if rollout.scores.old_logps is not None:
        train, engine = (_off(x, mask) for x in (rollout.scores.old_logps, rollout.rollout_logps))
        gap = (train - engine).clamp(-LIMIT, LIMIT)
        filled = mask.any(1)
        count = mask.sum(1).clamp_min(1)
        row_sum = gap.sum(1).clamp(-LIMIT, LIMIT)
        numbers = {
            "mismatch/logp_gap_mean": masked_mean((train - engine).abs(), mask),
            "mismatch/kl": masked_mean(-gap, mask),
            "mismatch/k3": masked_mean(gap.expm1() - gap, mask),
            "mismatch/chi2_token": masked_mean((2 * gap).expm1(), mask),
            "mismatch/chi2_sample": masked_mean((2 * row_sum).expm1(), filled),
            "mismatch/perplexity_train": masked_mean((-train.sum(1) / count).exp(), filled),
            "mismatch/perplexity_engine": masked_mean((-engine.sum(1) / count).exp(), filled),
            "mismatch/perplexity_ratio": masked_mean((-gap.sum(1) / count).exp(), filled),
        }
        if mask.any():
            numbers["mismatch/logp_gap_max"] = Max(float((train - engine).abs().max()))
    if rollout.loss_mask is not None:
        numbers["mismatch/rejected"] = masked_mean(1.0 - rollout.loss_mask.double(), mask)
    if rollout.weights is not None:
        numbers["mismatch/weight"] = masked_mean(rollout.weights.double(), rollout.trained_mask)
    return numbers


def _off(x_BA: Tensor, mask_BA: Tensor) -> Tensor:
    """Return ``x`` in float64, 0 off the mask."""
    return torch.where(mask_BA, x_BA.double(), 0)
