"""Agent: one iteration of policy-gradient learning as a LightningModule. Read `prepare`, then `training_step`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, cast

import lightning as L
from torch import Tensor

from lightning_agentrl.advantages import AdvantageEstimator, whiten
from lightning_agentrl.agents.actor_critic import ActorCritic
from lightning_agentrl.agents.checks import check_groups, check_scores, check_trainer, correction_for
from lightning_agentrl.agents.describe import RecentEpisodes, describe, describe_gradient
from lightning_agentrl.agents.gradients import step_by_group
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.mini_batch import ready_for_loss
from lightning_agentrl.agents.passes import rows_to_score, score_rollout
from lightning_agentrl.agents.scoring import Reader
from lightning_agentrl.agents.selection import corrected, filtered
from lightning_agentrl.agents.strategies import in_lockstep
from lightning_agentrl.agents.update import CurrentScores, accumulate_gradients
from lightning_agentrl.distributed import max_over_ranks, told_once
from lightning_agentrl.engines import PolicyHandle
from lightning_agentrl.losses import AggregationMode, GroupFilter, OffPolicyCorrection, check_aggregation
from lightning_agentrl.metrics.episodes import EpisodeMetrics
from lightning_agentrl.metrics.numbers import over_ranks
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.metrics.staleness import staleness_numbers
from lightning_agentrl.models.critic import Critic
from lightning_agentrl.models.kernels import Kernels
from lightning_agentrl.models.language_model import read_context_length
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.models.sharding import gathered
from lightning_agentrl.rollout import MiniBatch, RolloutDataModule
from lightning_agentrl.rollout.validation import EpisodeSeeds
from lightning_agentrl.types import Rollout

Phase = Literal["critic_warmup", "train"]


class Agent(ActorCritic, ABC):
    """The walk from a rollout to one optimizer step per mini-batch, with actor, critic and reference.

    Subclasses say what is learned: :meth:`shape_rewards`, :meth:`policy_loss`, :meth:`value_loss`.

    Args:
        model: hub id, local folder, or ``demo`` for the model that a package ships.
        critic: where values come from; None for estimators that need none.
        advantage: estimator of advantages and returns.
        needs_reference: score with the initial policy too: a frozen copy, or the base below the adapters.
        lr_actor: learning rate of the actor.
        lr_critic: learning rate of the critic.
        weight_decay: of AdamW, both groups.
        max_grad_norm_actor: clip of the actor's gradient norm.
        max_grad_norm_critic: clip of the critic's gradient norm.
        temperature: of sampling and of all log-probs.
        max_tokens_per_micro_batch: tokens of one forward pass; splits nothing but memory.
        gradient_checkpointing: recompute activations in the backward pass.
        recompute_logits: recompute the logits of the sampled tokens in the backward pass, 1024 tokens at a time; off:
            keep those of a micro-batch, which is faster and takes memory for tokens times vocabulary.
        lora: train adapters on the frozen model; None: all weights.
        kernels: ``compiled`` compiles the decoder layers, once per run; ``liger`` takes Liger's kernels, on a GPU.
        variance_proxy: log how signal and noise of the policy's gradient develop.
        correction: what to do where engine and trainer disagree about the sampled tokens; None: nothing.
        group_filter: which groups of a rollout are trained on; None: all.
        loss_aggregation: how the policy loss is averaged over a mini-batch.
        loss_norm_tokens: constant length by which ``seq-mean-token-sum-norm`` divides.
    """

    def __init__(
        self,
        model: str,
        critic: Critic | None,
        advantage: AdvantageEstimator,
        needs_reference: bool,
        lr_actor: float = 1e-6,
        lr_critic: float = 1e-5,
        weight_decay: float = 0.01,
        max_grad_norm_actor: float = 1.0,
        max_grad_norm_critic: float = 1.0,
        temperature: float = 1.0,
        max_tokens_per_micro_batch: int = 16384,
        gradient_checkpointing: bool = False,
        recompute_logits: bool = True,
        lora: LoRA | None = None,
        kernels: Kernels = "torch",
        variance_proxy: bool = False,
        correction: OffPolicyCorrection | None = None,
        group_filter: GroupFilter | None = None,
        loss_aggregation: AggregationMode = "token-mean",
        loss_norm_tokens: int | None = None,
    ) -> None:
        super().__init__(
            model=model,
            critic=critic,
            needs_reference=needs_reference,
            lr_actor=lr_actor,
            lr_critic=lr_critic,
            weight_decay=weight_decay,
            gradient_checkpointing=gradient_checkpointing,
            recompute_logits=recompute_logits,
            lora=lora,
            kernels=kernels,
        )
        self.automatic_optimization = False  # one optimizer step per training_step, of several micro-batches
        self.advantage = advantage
        self.max_grad_norm_actor, self.max_grad_norm_critic = max_grad_norm_actor, max_grad_norm_critic
        self.temperature = temperature
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.variance_proxy = variance_proxy
        if temperature <= 0:
            raise ValueError(f"temperature must be above 0 for training, got {temperature}")
        if advantage.needs_values and critic is None:
            raise ValueError(
                f"{type(advantage).__name__} needs values, so a critic must be given: set model.init_args.critic, "
                "for example to SeparateCritic"
            )
        check_aggregation(loss_aggregation, loss_norm_tokens)
        self.correction = correction
        self.group_filter = group_filter
        self.loss_aggregation: AggregationMode = loss_aggregation
        self.loss_norm_tokens = loss_norm_tokens
        self.phase: Phase = "train"
        self.explained_variance: float | None = None
        self.clock = StageClock()
        self.recent_episodes = RecentEpisodes()
        self.validation_metrics = EpisodeMetrics()
        self.iteration_metrics: dict[str, float] = {}  # logged with the first step of the iteration

    # What a researcher overrides

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Token rewards [B, A] for the estimator; scores are there. By default the environment's with penalties."""
        return rollout.rewards

    @abstractmethod
    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        """Loss per action token [B, A].

        ``scores.logps`` and ``scores.entropy`` are those of the current weights, with gradient; the scores from before
        the update are in ``batch.scores``.
        """

    @abstractmethod
    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        """Loss per action token [B, A] of the current values [B, A], with gradient."""

    def update_metrics(self, batch: Rollout, scores: CurrentScores) -> dict[str, Tensor]:
        """Per-token numbers [B, A] to be averaged over the trained tokens of the mini-batch and logged."""
        return {}

    @property
    def needs_mini_batch_logps(self) -> bool:
        """Whether :meth:`pick_tokens` is called, after one more pass without gradients in each step but the first."""
        return False

    def pick_tokens(self, batch: Rollout, logps: Tensor) -> Tensor | None:
        """Tokens [B, A] of a whole mini-batch that the policy loss treats apart, given its current log-probs."""
        return None

    @property
    def needs_old_logps(self) -> bool:
        """Whether rewards or advantages are made of the log-probs of the sampled tokens.

        If not, and an iteration is a single optimizer step, the pass that gives them is left out: before that step they
        are those of the step itself.
        """
        return True

    @property
    def takes_kl_from_rewards(self) -> bool:
        """Whether :meth:`shape_rewards` subtracts a KL, so that scores may fall below 0."""
        return False

    # Iteration, part 1: from a raw rollout to advantages (called by the stream)

    def prepare(self, rollout: Rollout) -> Rollout:
        """Score, shape rewards, estimate. Log-probs that are there already are kept; values are always fresh.

        A subclass adds numbers to ``iteration_metrics`` after it, to have them logged.
        """
        collected_now = rollout.scores.old_logps is None
        with self.clock.stage("score", total=rows_to_score(self, rollout)), self.evaluation_mode():
            rollout = self.score(rollout)
        rollout = corrected(rollout, self.correction, self.reduce_sum)
        rollout = rollout.union(shaped_rewards=self.shape_rewards(rollout))
        advantages, returns = self.advantage.estimate(rollout, self.reduce_sum)
        if self.advantage.whiten:
            advantages = whiten(advantages, rollout.trained_mask, self.reduce_sum)
        rollout = rollout.union(advantages=advantages, returns=returns)
        with self.clock.stage("log"):
            self.iteration_metrics = describe(rollout, self.device, self.reduce_sum)
            self.explained_variance = self.iteration_metrics.get("critic/explained_variance")
            if collected_now:
                if self.datamodule.max_staleness:
                    steps = self.datamodule.steps_per_iteration
                    ages = staleness_numbers(rollout.turns, self.policy_version, steps)
                    self.iteration_metrics |= over_ranks(ages, self.device)
                self.iteration_metrics |= self.recent_episodes.update(rollout)
                for callback in cast(list[L.Callback], cast(Any, self.trainer).callbacks):
                    if isinstance(callback, RolloutCallback):
                        callback.on_rollout(self.trainer, self, rollout)
        if self.group_filter is not None and self.phase == "train":  # the warm-up of a critic takes all groups
            rollout, numbers = filtered(rollout, self.group_filter, self.gather)
            self.iteration_metrics |= over_ranks(numbers, self.device)
        return rollout

    def score(self, rollout: Rollout) -> Rollout:
        """Add log-probs of actor and reference, entropy, values and bootstrap values."""
        return score_rollout(self, rollout)

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Whether the scoring pass also gives the sum of squared probabilities at each token."""
        return self.advantage.needs_sum_pi_squared or self.variance_proxy

    # Iteration, part 2: one optimizer step

    def training_step(self, batch: MiniBatch, batch_idx: int) -> None:
        """Gradients of all micro-batches, clipped per group, then one step."""
        rollout = batch.rollout
        steps = self.datamodule.steps_per_iteration
        with self.clock.stage("update", total=steps * len(rollout), done=batch_idx * len(rollout)):
            optimizer = cast(Any, self.optimizers())
            optimizer.zero_grad(set_to_none=True)
            if self.phase == "train":
                rollout = ready_for_loss(self, rollout, first=batch_idx == 0)
            metrics = accumulate_gradients(self, rollout)
            limits = {"actor": self.max_grad_norm_actor, "critic": self.max_grad_norm_critic}
            norms = step_by_group(optimizer, limits, held="actor" if self.phase == "critic_warmup" else None)
        self.clock.count("update", turns=len(rollout.turns), tokens=sum(len(s.ids) for s in rollout.samples))
        metrics |= {f"grad_norm/{name}": norm for name, norm in norms.items()} | self.iteration_metrics
        if self.variance_proxy and "actor" in norms:
            metrics |= describe_gradient(batch.rollout, norms["actor"], self.reduce_sum)
        self.iteration_metrics = {}
        self.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)

    def on_train_epoch_start(self) -> None:
        self.clock.read()  # what came between two iterations belongs to neither

    def on_train_epoch_end(self) -> None:
        times = over_ranks(self.clock.read(self.trainer.world_size), self.device)
        if "time/update_seconds" in times:  # a resumed run ends its last epoch once more, with nothing done
            self.log_dict(times)

    # Validation

    def validation_step(self, batch: EpisodeSeeds, batch_idx: int) -> None:
        if self.trainer.sanity_checking:  # whole episodes are no sanity check
            return
        self.validation_metrics.update(self.datamodule.play_held_out(batch.seeds))

    def on_validation_epoch_end(self) -> None:
        numbers = {f"val/{name}": value for name, value in self.validation_metrics.compute().items()}
        self.validation_metrics.reset()
        self.log_dict(numbers)

    # Lightning hooks around it

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["recent_episodes"] = self.recent_episodes.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.recent_episodes.load_state_dict(checkpoint.get("recent_episodes", []))

    def setup(self, stage: str) -> None:
        """Refuse what does not fit together, with the tokenizer alone: weights may take minutes."""
        with told_once():
            if stage == "fit":
                check_trainer(self.trainer, self.datamodule.steps_per_iteration, self.lora is not None)
                check_groups(self.advantage, self.datamodule.groups, self.group_filter, self.loss_aggregation)
                check_scores(self.advantage, self.takes_kl_from_rewards, self.datamodule.interaction)
            super().setup(stage)
            self.datamodule.check(self.tokenizer, read_context_length(self.model))

    def on_fit_start(self) -> None:
        self.correction = correction_for(self.correction, self.datamodule.max_staleness)
        self._connect()

    def on_validation_start(self) -> None:
        self._connect()

    def _connect(self) -> None:
        for reference in self._reference:
            reference.to(self.device, dtype=None if self.lora else self.actor.lm.dtype)  # a base is shared already
        self.datamodule.connect(self)

    @property
    def datamodule(self) -> RolloutDataModule:
        return cast(RolloutDataModule, cast(Any, self.trainer).datamodule)

    # What data module and engine ask for

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.advantage.needs_greedy_baseline

    @property
    def policy_version(self) -> int:
        """Optimizer steps behind the current weights."""
        return self.trainer.global_step

    def policy_handle(self, close_ids: Sequence[int]) -> PolicyHandle:
        return PolicyHandle(self.actor, close_ids, self.cached_precision, lambda: gathered(self.actor))

    def reader(self) -> Reader:
        return Reader(
            self.temperature,
            self.max_tokens_per_micro_batch,
            self.device,
            self.shares_prefixes,
            self.clock.advance,
            agree=max_over_ranks if in_lockstep(self.trainer.strategy) else None,
        )
