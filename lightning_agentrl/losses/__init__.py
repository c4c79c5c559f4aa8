"""Losses per action token, and their mean over the tokens of the whole mini-batch."""

from lightning_agentrl.losses.aggregation import AggregationMode, aggregate, masked_sum
from lightning_agentrl.losses.kl import AdaptiveKL, FixedKL, KLCoefficient, KLKind, kl_estimate
from lightning_agentrl.losses.policy import PolicyLoss, PPOClip, clip_fractions, ppo_clip_loss
from lightning_agentrl.losses.value import clipped_value_loss, first_token_weights

__all__ = [
    "AdaptiveKL",
    "AggregationMode",
    "FixedKL",
    "KLCoefficient",
    "KLKind",
    "PPOClip",
    "PolicyLoss",
    "aggregate",
    "clip_fractions",
    "clipped_value_loss",
    "first_token_weights",
    "kl_estimate",
    "masked_sum",
    "ppo_clip_loss",
]
