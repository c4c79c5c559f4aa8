"""PPO on turns: clipped policy and value losses, KL in the reward, entropy bonus."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_agentrl.advantages import kl_in_reward
from lightning_agentrl.agents.agent import KEYS, Agent
from lightning_agentrl.agents.scoring import Needs
from lightning_agentrl.agents.selection import token_noise
from lightning_agentrl.agents.update import CurrentScores
from lightning_agentrl.distributed import raise_once
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.losses import (
    FixedKL,
    KLCoefficient,
    KLKind,
    KLLossKind,
    PolicyLoss,
    PPOClip,
    clipped_value_loss,
    first_token_weights,
    kl_estimate,
    kl_loss,
)
from lightning_agentrl.losses.aggregation import action_weights
from lightning_agentrl.models.loading import model_name
from lightning_agentrl.rollout import Prepared
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.plain_config import by_key, check_kind, to_plain

_LOSS = f"{KEYS}.policy_loss"


@dataclass(frozen=True)
class KL:
    """KL to a reference: the initial policy or a teacher. If both coefficients are 0, no reference is loaded.

    Args:
        reward: coefficient of the KL in the reward, fixed or adaptive.
        reward_kind: estimator of the KL in the reward.
        loss: coefficient of the KL in the policy loss, in addition to the KL in the reward.
        loss_kind: estimator of the KL in the loss; ``k1+`` and ``k3+`` have the value of k1 and k3 and the gradient of
            k2.
        reference: hub id or folder of a model with the same tokens, such as a teacher; null: the initial policy.
        action_share: for the KL in the loss, fraction of a reply's weight on the tokens that name the action, if the
            reply has a thought; null: all tokens have equal weights.
    """

    reward: KLCoefficient | float = 0.001
    reward_kind: KLKind = "k1"
    loss: float = 0.0
    loss_kind: KLLossKind = "k3+"
    reference: str | None = None
    action_share: float | None = None

    def __post_init__(self) -> None:
        check_kind(self.reward, KLCoefficient | float | int, f"{KEYS}.kl.reward")
        if not 0 <= self.loss < math.inf:
            raise ValueError(f"kl.loss must not be negative, got {self.loss}")
        if self.reference is not None:
            object.__setattr__(self, "reference", model_name(self.reference, f"{KEYS}.kl.reference"))
        if self.reference is not None and self.reward == 0 and self.loss == 0:
            raise ValueError(f"{KEYS}.kl.reference needs a coefficient above 0; set {KEYS}.kl.loss or {KEYS}.kl.reward")
        if self.action_share is not None and not 0 < self.action_share <= 1:
            raise ValueError(f"{KEYS}.kl.action_share must be above 0 and at most 1, got {self.action_share}")


class PPOAgent(Agent):
    """Turn-level PPO as published for long-horizon agents, with every part replaceable.

    Args:
        policy_loss: policy loss per action token and its average over a mini-batch; by default PPO with clip 0.2 and
            dual clip 3. The value loss is always the mean over tokens.
        kl: KL to a reference policy; by default a coefficient of 0.001 in the reward.
        entropy_bonus: weight of the entropy in the policy loss.
        value_clip: half-width of the range around the old value beyond which the value loss has no gradient; None: no
            clip.
        first_token_weight: weight of the first token of a turn in the value loss; its value bootstraps the previous
            turn.
        args: positional arguments of :class:`Agent`.
        kwargs: keyword arguments of :class:`Agent`: model, critic, advantage, correction, optim and others.
    """

    def __init__(
        self,
        *args: Any,
        policy_loss: PolicyLoss | None = None,
        kl: KL | None = None,
        entropy_bonus: float = 0.001,
        value_clip: float | None = 0.5,
        first_token_weight: float = 3.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.loss = check_kind(policy_loss, PolicyLoss, f"{KEYS}.policy_loss") or PPOClip()
        self.aggregation, self.norm_tokens = self.loss.aggregation, self.loss.norm_tokens
        self.kl = check_kind(kl, KL, f"{KEYS}.kl") or KL()
        self.kl_coefficient = self._configured_coefficient()
        self._uses_kl = self.kl_coefficient.value > 0 or self.kl.loss > 0
        self.entropy_bonus = entropy_bonus
        if value_clip is not None and not value_clip > 0:
            raise ValueError(f"{KEYS}.value_clip must be above 0, or null for no clip, got {value_clip}")
        self.value_clip = value_clip
        self.first_token_weight = first_token_weight

    def _configured_coefficient(self) -> KLCoefficient:
        """Return the initial KL coefficient of a run; a copy, so that adaptation does not change the configuration."""
        reward = self.kl.reward
        return FixedKL(reward) if isinstance(reward, int | float) else deepcopy(reward)

    @property
    def needs(self) -> Needs:
        """Quantities for the KL (old and reference log-probs) and for the policy loss."""
        return super().needs | Needs(
            old_logps=self._uses_kl, ref_logps=self._uses_kl, mini_batch_logps=self.loss.needs_mini_batch_logps
        )

    @property
    def reference(self) -> str:
        """Hub id or folder of the reference model of the KL."""
        return self.kl.reference or super().reference

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self.trainer.global_step == 0:  # a resumed run keeps its adapted coefficient
            self.kl_coefficient = self._configured_coefficient()
        if stage == "fit" and self.datamodule.groups is None:  # groups have an unknown number of turns
            with raise_once():
                self.kl_coefficient.check_turns(self.datamodule.sizes.turns_per_rollout)

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Return the rewards minus the KL of each sampled token to the reference."""
        scores = rollout.scores
        if scores.ref_logps is None or scores.old_logps is None or self.kl_coefficient.value == 0:
            return rollout.rewards
        kl = kl_estimate(scores.old_logps, scores.ref_logps, self.kl.reward_kind)
        return kl_in_reward(rollout.rewards, kl, rollout.action_mask, self.kl_coefficient.value)

    @property
    def takes_kl_from_rewards(self) -> bool:
        return self.kl_coefficient.value > 0

    def prepare(self, rollout: Rollout) -> Prepared:
        """Prepare the rollout as :class:`Agent` does, then update an adaptive KL coefficient."""
        prepared = super().prepare(rollout)
        if "kl/reference" in prepared.metrics:
            prepared.metrics["kl/coefficient"] = self.kl_coefficient.value
            if self.phase == "train":
                turns = int(self.ranks.sum(torch.tensor(len(rollout.turns))))  # including turns that are not trained on
                self.kl_coefficient.update(prepared.metrics["kl/reference"], turns)
        return prepared

    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        assert batch.scores.old_logps is not None
        assert batch.advantages is not None
        old_logps, trained = batch.scores.old_logps, batch.trained_mask
        loss = self.loss(scores.logps, old_logps, batch.advantages, trained, batch.picked)
        if batch.weights is not None:
            loss = loss * batch.weights
        if self.kl.loss > 0:
            loss = loss + self.kl.loss * self._kl(batch, scores)
        return loss - self.entropy_bonus * scores.entropy

    def _kl(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        """Return the KL of the current policy to the reference as a loss per action token [B, A]."""
        assert batch.scores.old_logps is not None
        assert batch.scores.ref_logps is not None
        kl = kl_loss(scores.logps, batch.scores.old_logps, batch.scores.ref_logps, self.kl.loss_kind)
        return kl if self.kl.action_share is None else kl * action_weights(batch, self.kl.action_share).to(kl.device)

    def pick_tokens(self, batch: Rollout, logps: Tensor) -> Tensor:
        assert batch.scores.old_logps is not None
        assert batch.advantages is not None
        noise = token_noise(batch, derive_seed(self.datamodule.seed, self.policy_version))
        return self.loss.pick(
            logps, batch.scores.old_logps, batch.advantages, batch.trained_mask, noise, self.ranks.gather
        )

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
        metrics = dict(self.loss.metrics(scores.logps, old_logps, batch.advantages, trained))
        if batch.picked is not None:
            metrics["picked_fraction"] = batch.picked.float()
        if self.kl.loss > 0:
            metrics["kl_loss"] = self._kl(batch, scores)
        return {
            "policy/entropy": scores.entropy,
            "policy/approx_kl": old_logps - scores.logps,
            **{f"policy/{name}": x for name, x in metrics.items()},
        }

    def settings(self) -> dict[str, Any]:
        return super().settings() | by_key(to_plain(self.loss, strict=False), _LOSS)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["kl_coefficient"] = self.kl_coefficient.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_coefficient.load_state_dict(checkpoint["kl_coefficient"])
