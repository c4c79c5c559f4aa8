"""PPO on turns: clipped policy and value losses, KL in the reward, entropy bonus."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.advantages import AdvantageEstimator, DualDiscountGAE, kl_in_reward
from lightning_agentrl.agents.agent import Agent
from lightning_agentrl.agents.mini_batch import token_noise
from lightning_agentrl.agents.update import CurrentScores
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.losses import (
    AggregationMode,
    FixedKL,
    GroupFilter,
    KLCoefficient,
    KLKind,
    KLLossKind,
    OffPolicyCorrection,
    PolicyLoss,
    PPOClip,
    clipped_value_loss,
    first_token_weights,
    kl_estimate,
    kl_loss,
)
from lightning_agentrl.models.critic import Critic, SeparateCritic
from lightning_agentrl.types import Rollout


class PPOAgent(Agent):
    """Turn-level PPO as published for long-horizon agents; every part of it can be replaced.

    Args:
        model: hub id, local folder, or ``demo`` for the model that a package ships.
        critic: where values come from; by default an own backbone if the estimator needs values, else none.
        advantage: estimator; dual-discount GAE by default.
        policy_loss: loss per action token; PPO with clip 0.2 and dual clip 3 by default.
        loss_aggregation: how the policy loss is averaged over a mini-batch; None: as the loss prefers. The value loss
            is always the mean over tokens.
        loss_norm_tokens: constant length by which ``seq-mean-token-sum-norm`` divides, such as the longest reply.
        correction: what to do where engine and trainer disagree about the sampled tokens; None: nothing, or
            ``TruncatedWeights`` where rollouts are collected ahead (``max_staleness``).
        group_filter: which groups of a rollout are trained on; None: all.
        kl_in_reward: coefficient of the KL to the initial policy in the reward, fixed or adaptive; 0.001 by default. A
            coefficient of 0 keeps no reference.
        kl_kind: estimator of that KL.
        kl_loss: weight of the KL to the initial policy in the policy loss, beside the one in the reward.
        kl_loss_kind: estimator of that KL; ``k1+`` and ``k3+`` have the value of k1 and k3 and the gradient of k2.
        entropy_bonus: weight of the entropy in the policy loss.
        value_clip: how far a value may move from its old value before the value loss stops pulling; None: no clip.
        first_token_weight: weight of the first token of a turn in the value loss, whose value bootstraps the turn
            before.
        kwargs: what every :class:`Agent` takes: learning rates, clips, memory.
    """

    def __init__(
        self,
        model: str,
        critic: Critic | None = None,
        advantage: AdvantageEstimator | None = None,
        policy_loss: PolicyLoss | None = None,
        loss_aggregation: AggregationMode | None = None,
        loss_norm_tokens: int | None = None,
        correction: OffPolicyCorrection | None = None,
        group_filter: GroupFilter | None = None,
        kl_in_reward: KLCoefficient | float = 0.001,
        kl_kind: KLKind = "k1",
        kl_loss: float = 0.0,
        kl_loss_kind: KLLossKind = "k3+",
        entropy_bonus: float = 0.001,
        value_clip: float | None = 0.5,
        first_token_weight: float = 3.0,
        **kwargs: Any,
    ) -> None:
        if not 0 <= kl_loss < math.inf:
            raise ValueError(f"kl_loss must not be negative, got {kl_loss}")
        advantage = advantage or DualDiscountGAE()
        kl = FixedKL(kl_in_reward) if isinstance(kl_in_reward, int | float) else kl_in_reward
        loss = policy_loss or PPOClip()
        super().__init__(
            model=model,
            critic=critic or (SeparateCritic() if advantage.needs_values else None),
            advantage=advantage,
            needs_reference=kl.value > 0 or kl_loss > 0,
            correction=correction,
            group_filter=group_filter,
            loss_aggregation=loss_aggregation or loss.aggregation,
            loss_norm_tokens=loss_norm_tokens,
            **kwargs,
        )
        self.loss = loss
        self.kl_coefficient = kl
        self.kl_kind: KLKind = kl_kind
        self.kl_loss = kl_loss
        self.kl_loss_kind: KLLossKind = kl_loss_kind
        self.entropy_bonus = entropy_bonus
        self.value_clip = value_clip
        self.first_token_weight = first_token_weight

    @property
    def needs_old_logps(self) -> bool:
        """For the KL to the reference; a subclass that shapes rewards may read any score."""
        return self.needs_reference or type(self).shape_rewards is not PPOAgent.shape_rewards

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Subtract the KL of each sampled token to the reference."""
        scores = rollout.scores
        if scores.ref_logps is None or scores.old_logps is None or self.kl_coefficient.value == 0:
            return rollout.rewards
        kl = kl_estimate(scores.old_logps, scores.ref_logps, self.kl_kind)
        return kl_in_reward(rollout.rewards, kl, rollout.action_mask, self.kl_coefficient.value)

    @property
    def takes_kl_from_rewards(self) -> bool:
        return self.kl_coefficient.value > 0

    def prepare(self, rollout: Rollout) -> Rollout:
        """As every agent; then an adaptive coefficient takes the KL that was seen."""
        rollout = super().prepare(rollout)
        if "kl/reference" in self.iteration_metrics:
            self.iteration_metrics["kl/coefficient"] = self.kl_coefficient.value
            if self.phase == "train":
                turns = int(self.reduce_sum(torch.tensor(len(rollout.turns))))
                self.kl_coefficient.update(self.iteration_metrics["kl/reference"], turns)
        return rollout

    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        assert batch.scores.old_logps is not None
        assert batch.advantages is not None
        old_logps, trained = batch.scores.old_logps, batch.trained_mask
        loss = self.loss(scores.logps, old_logps, batch.advantages, trained, batch.picked)
        if batch.weights is not None:
            loss = loss * batch.weights
        if self.kl_loss > 0:
            loss = loss + self.kl_loss * self._kl(batch, scores)
        return loss - self.entropy_bonus * scores.entropy

    def _kl(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        """KL of the current policy to the reference as a loss, [B, A]."""
        assert batch.scores.old_logps is not None
        assert batch.scores.ref_logps is not None
        return kl_loss(scores.logps, batch.scores.old_logps, batch.scores.ref_logps, self.kl_loss_kind)

    @property
    def needs_mini_batch_logps(self) -> bool:
        return self.loss.needs_mini_batch_logps

    def pick_tokens(self, batch: Rollout, logps: Tensor) -> Tensor:
        assert batch.scores.old_logps is not None
        assert batch.advantages is not None
        noise = token_noise(batch, derive_seed(self.datamodule.seed, self.policy_version))
        return self.loss.pick(logps, batch.scores.old_logps, batch.advantages, batch.trained_mask, noise, self.gather)

    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        assert batch.scores.values is not None
        assert batch.returns is not None
        loss = clipped_value_loss(values, batch.scores.values, batch.returns, self.value_clip)
        return loss * first_token_weights(batch.action_mask, batch.turn_ids, self.first_token_weight)

    @torch.no_grad()
    def update_metrics(self, batch: Rollout, scores: CurrentScores) -> dict[str, Tensor]:
        assert batch.scores.old_logps is not None
        assert batch.advantages is not None
        old_logps, trained = batch.scores.old_logps, batch.trained_mask
        metrics = self.loss.metrics(scores.logps, old_logps, batch.advantages, trained)
        if batch.picked is not None:
            metrics["picked_fraction"] = batch.picked.float()
        if self.kl_loss > 0:
            metrics["kl_loss"] = self._kl(batch, scores)
        return {
            "policy/entropy": scores.entropy,
            "policy/approx_kl": old_logps - scores.logps,
            **{f"policy/{name}": x for name, x in metrics.items()},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["kl_coefficient"] = self.kl_coefficient.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_coefficient.load_state_dict(checkpoint["kl_coefficient"])
