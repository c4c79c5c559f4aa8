"""Losses per action token, their aggregation over a mini-batch, and off-policy correction."""

from lightning_agentrl.losses.aggregation import (
    AggregationMode,
    aggregate,
    check_aggregation,
    masked_sum,
    row_weights,
)
from lightning_agentrl.losses.cispo import CISPO, cispo_loss
from lightning_agentrl.losses.correction import (
    Bypass,
    IcePop,
    NoCorrection,
    OffPolicyCorrection,
    RejectOnly,
    TruncatedWeights,
    effective_share,
    importance_ratios,
    masked_log_ratio,
    normalised_weights,
)
from lightning_agentrl.losses.covariance import ClipCov, KLCov, covariances, largest
from lightning_agentrl.losses.dppo import DPPO, DPPOKL, DPPOTV, dppo_loss, inside_region, kl_shift, tv_shift
from lightning_agentrl.losses.dro import DRO, dro_loss
from lightning_agentrl.losses.filters import (
    DropEqualScores,
    GroupFilter,
    KeepCovering,
    KeepWidest,
    covering_groups,
    group_scores,
    spread_of,
    varied_groups,
    widest_groups,
)
from lightning_agentrl.losses.kl import (
    AdaptiveKL,
    FixedKL,
    KLCoefficient,
    KLKind,
    KLLossKind,
    kl_estimate,
    kl_loss,
)
from lightning_agentrl.losses.policy import PolicyLoss
from lightning_agentrl.losses.ppo import PPOClip, clip_fractions, ppo_clip_loss
from lightning_agentrl.losses.reinforce import Reinforce, reinforce_loss
from lightning_agentrl.losses.rejection import (
    DivergenceRejection,
    RatioRejection,
    Rejection,
    RejectionLevel,
    divergence_below,
    ratio_inside,
)
from lightning_agentrl.losses.sapo import SAPO, sapo_loss
from lightning_agentrl.losses.sequence import GMPO, GSPO, gmpo_loss, gspo_loss
from lightning_agentrl.losses.value import clipped_value_loss, first_token_weights, first_tokens, of_first_tokens
from lightning_agentrl.types.ranks import Gather, alone

__all__ = [
    "CISPO",
    "DPPO",
    "DPPOKL",
    "DPPOTV",
    "DRO",
    "GMPO",
    "GSPO",
    "SAPO",
    "AdaptiveKL",
    "AggregationMode",
    "Bypass",
    "ClipCov",
    "DivergenceRejection",
    "DropEqualScores",
    "FixedKL",
    "Gather",
    "GroupFilter",
    "IcePop",
    "KLCoefficient",
    "KLCov",
    "KLKind",
    "KLLossKind",
    "KeepCovering",
    "KeepWidest",
    "NoCorrection",
    "OffPolicyCorrection",
    "PPOClip",
    "PolicyLoss",
    "RatioRejection",
    "Reinforce",
    "RejectOnly",
    "Rejection",
    "RejectionLevel",
    "TruncatedWeights",
    "aggregate",
    "alone",
    "check_aggregation",
    "cispo_loss",
    "clip_fractions",
    "clipped_value_loss",
    "covariances",
    "covering_groups",
    "divergence_below",
    "dppo_loss",
    "dro_loss",
    "effective_share",
    "first_token_weights",
    "first_tokens",
    "gmpo_loss",
    "group_scores",
    "gspo_loss",
    "importance_ratios",
    "inside_region",
    "kl_estimate",
    "kl_loss",
    "kl_shift",
    "largest",
    "masked_log_ratio",
    "masked_sum",
    "normalised_weights",
    "of_first_tokens",
    "ppo_clip_loss",
    "ratio_inside",
    "reinforce_loss",
    "row_weights",
    "sapo_loss",
    "spread_of",
    "tv_shift",
    "varied_groups",
    "widest_groups",
]
