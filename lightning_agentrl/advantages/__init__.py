"""Advantage estimators: scored rollout -> advantages and returns."""

from lightning_agentrl.advantages.base import AdvantageEstimator, estimated, token_rewards
from lightning_agentrl.advantages.bilevel_gae import BiLevelGAE, bilevel_gae
from lightning_agentrl.advantages.episodes import Episodes, GroupEstimator, Groups, ScoreEstimator, group_episodes
from lightning_agentrl.advantages.forked import Forked, minus_state_values
from lightning_agentrl.advantages.gae import GAE, DualDiscountGAE, dual_discount_gae, values_after
from lightning_agentrl.advantages.gdpo import GDPO, gdpo_advantages
from lightning_agentrl.advantages.gigpo import GiGPO, anchor_states
from lightning_agentrl.advantages.grpo import (
    GPG,
    GRPO,
    OPO,
    RLOO,
    DrGRPO,
    MaxRL,
    PassAtK,
    best_minus_second,
    centred,
    gpg_advantages,
    maxrl_advantages,
    minus_length_weighted,
    minus_others,
    standardised,
)
from lightning_agentrl.advantages.layout import (
    Layout,
    Turns,
    ValueStatistics,
    backward_sum,
    compress,
    kl_in_reward,
    value_statistics,
    whiten,
)
from lightning_agentrl.advantages.optimal_token_baseline import OptimalTokenBaseline, optimal_token_baseline
from lightning_agentrl.advantages.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline, rewards_to_go
from lightning_agentrl.advantages.remax import ReMax, minus_greedy
from lightning_agentrl.advantages.turn_level import TurnLeaveOneOut, others_at_turn
from lightning_agentrl.advantages.variance_proxy import VarianceProxies, token_energy, variance_proxies
from lightning_agentrl.types.rollout import Reduce

__all__ = [
    "GAE",
    "GDPO",
    "GPG",
    "GRPO",
    "OPO",
    "RLOO",
    "AdvantageEstimator",
    "BiLevelGAE",
    "DrGRPO",
    "DualDiscountGAE",
    "Episodes",
    "Forked",
    "GiGPO",
    "GroupEstimator",
    "Groups",
    "Layout",
    "MaxRL",
    "OptimalTokenBaseline",
    "PassAtK",
    "ReMax",
    "Reduce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "ScoreEstimator",
    "TurnLeaveOneOut",
    "Turns",
    "ValueStatistics",
    "VarianceProxies",
    "anchor_states",
    "backward_sum",
    "best_minus_second",
    "bilevel_gae",
    "centred",
    "compress",
    "dual_discount_gae",
    "estimated",
    "gdpo_advantages",
    "gpg_advantages",
    "group_episodes",
    "kl_in_reward",
    "maxrl_advantages",
    "minus_greedy",
    "minus_length_weighted",
    "minus_others",
    "minus_state_values",
    "optimal_token_baseline",
    "others_at_turn",
    "rewards_to_go",
    "standardised",
    "token_energy",
    "token_rewards",
    "value_statistics",
    "values_after",
    "variance_proxies",
    "whiten",
]
