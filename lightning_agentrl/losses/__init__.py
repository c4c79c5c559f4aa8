"""Losses per action token; the agent divides them by the tokens of the whole mini-batch."""

from lightning_agentrl.losses.kl import AdaptiveKL, FixedKL, KLCoefficient, KLKind, kl_estimate
from lightning_agentrl.losses.policy import PolicyLoss, PPOClip, ppo_clip_loss
from lightning_agentrl.losses.value import clipped_value_loss, first_token_weights

__all__ = [
    "AdaptiveKL",
    "FixedKL",
    "KLCoefficient",
    "KLKind",
    "PPOClip",
    "PolicyLoss",
    "clipped_value_loss",
    "first_token_weights",
    "kl_estimate",
    "ppo_clip_loss",
]
