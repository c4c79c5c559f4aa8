"""Advantage estimators: scored rollout -> advantages and returns."""

from lightning_agentrl.advantages.base import AdvantageEstimator
from lightning_agentrl.advantages.diagnostics import ValueStatistics, value_statistics
from lightning_agentrl.advantages.gae import GAE, DualDiscountGAE, dual_discount_gae
from lightning_agentrl.advantages.layout import Layout, compress
from lightning_agentrl.advantages.rewards import kl_in_reward
from lightning_agentrl.advantages.whitening import whiten

__all__ = [
    "GAE",
    "AdvantageEstimator",
    "DualDiscountGAE",
    "Layout",
    "ValueStatistics",
    "compress",
    "dual_discount_gae",
    "kl_in_reward",
    "value_statistics",
    "whiten",
]
