"""Agent: one iteration of policy-gradient learning as a LightningModule. Read `prepare`, then `training_step`."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from lightning_agentrl.advantages import AdvantageEstimator, DualDiscountGAE, estimated
from lightning_agentrl.agents.checks import check_keys, check_rounded, check_run, choose_correction
from lightning_agentrl.agents.engine_check import EngineCheck
from lightning_agentrl.agents.hooks import Attempt, play_held_out, show_engine, show_rollout
from lightning_agentrl.agents.metrics_of_run import (
    RecentEpisodes,
    describe_collected,
    describe_prepared,
    describe_step,
)
from lightning_agentrl.agents.models import Compute, models_for, readers_for, sequence_group_for
from lightning_agentrl.agents.optim import Optim, Steps, prepare_strategy
from lightning_agentrl.agents.resume import begin_run, check_sharded, load_agent, save_agent, settings_of
from lightning_agentrl.agents.scoring import (
    Needs,
    naming_missing,
    needs_before_update,
    policy_handle,
    reader_for,
    score_rollout,
    scoring,
)
from lightning_agentrl.agents.selection import corrected, lost_rows, select, without_not_finite, without_rows
from lightning_agentrl.agents.sharding import check_mesh
from lightning_agentrl.agents.update import CurrentScores, compute_gradient, take_step
from lightning_agentrl.distributed import Ranks, over_ranks, raise_once
from lightning_agentrl.losses import AggregationMode, GroupFilter, OffPolicyCorrection
from lightning_agentrl.metrics.episodes import EpisodeMetrics
from lightning_agentrl.metrics.stages import StageClock
from lightning_agentrl.models.critic import Critic, SeparateCritic, follow_returns
from lightning_agentrl.models.loading import model_name
from lightning_agentrl.models.lora import LoRA, frozen_weights
from lightning_agentrl.models.sequence import SequenceGroup
from lightning_agentrl.rollout import MiniBatch, Phase, Prepared, RolloutDataModule
from lightning_agentrl.rollout.collector import Connection
from lightning_agentrl.types import Rollout
from lightning_agentrl.types.plain_config import check_kind, keep_plain

KEYS = "model.init_args"  # config key of an agent's arguments


class Agent(L.LightningModule, ABC):
    """Base class of agents: one iteration of learning, from a rollout to one optimizer step per mini-batch.

    Subclasses define what is learned (:meth:`shape_rewards`, :meth:`policy_loss`, :meth:`value_loss`) and which
    quantities must be computed for it (:attr:`needs`). Lightning's hooks are not empty here: a subclass that overrides
    a hook (``setup``, ``on_fit_start``, ``on_train_epoch_end``, ``on_save_checkpoint``, ...) must call ``super()``
    first.

    Args:
        model: hub id, local folder, or ``demo`` (``demo-tools``: with tools) for the bundled model.
        critic: module that computes values; by default one with a separate backbone if the estimator needs values, else
            no critic.
        advantage: estimator of advantages and returns; dual-discount GAE by default.
        correction: correction of differences between the log-probs of engine and trainer; None: no correction, or
            ``TruncatedWeights`` if rollouts are collected ahead (``max_staleness``).
        group_filter: filter that selects the groups of a rollout to train on; None: all groups.
        lora: adapters to train on the frozen model; None: train all weights.
        train_tower: whether to train the vision tower of a model with images, too.
        optim: learning rates and their schedules, weight decay and gradient clips of both parameter groups.
        compute: settings that trade memory for time.
        temperature: temperature of sampling and of all log-probs.
        variance_proxy: whether to log signal and noise of the policy's gradient.
    """

    aggregation: AggregationMode = "token-mean"  # how the policy loss is averaged over a mini-batch
    norm_tokens: int | None = None  # constant length by which ``seq-mean-token-sum-norm`` divides

    def __init__(
        self,
        model: str,
        critic: Critic | None = None,
        advantage: AdvantageEstimator | None = None,
        correction: OffPolicyCorrection | None = None,
        group_filter: GroupFilter | None = None,
        lora: LoRA | None = None,
        train_tower: bool = False,
        optim: Optim | None = None,
        compute: Compute | None = None,
        temperature: float = 1.0,
        variance_proxy: bool = False,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # each training_step takes one optimizer step from several micro-batches
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be above 0 for training, got {temperature}")
        with warnings.catch_warnings():
            # A critic is a module, but has no weights yet.
            warnings.filterwarnings("ignore", message=".*is an instance of `nn.Module`.*")
            self.save_hyperparameters(logger=False)
        self.undescribed = keep_plain(self.hparams)
        self.model = model_name(model, f"{KEYS}.model")
        self.advantage = check_kind(advantage, AdvantageEstimator, f"{KEYS}.advantage") or DualDiscountGAE()
        critic = check_kind(critic, Critic, f"{KEYS}.critic")
        self.critic = critic or (SeparateCritic() if self.advantage.needs_values else None)
        self.correction = check_kind(correction, OffPolicyCorrection, f"{KEYS}.correction")
        # Default correction of a run that configures no correction.
        self.chosen_correction: OffPolicyCorrection | None = None
        self.group_filter = check_kind(group_filter, GroupFilter, f"{KEYS}.group_filter")
        self.lora = check_kind(lora, LoRA, f"{KEYS}.lora")
        # Checkpoints lack frozen weights; `check_weights` compares the other weights.
        self.strict_loading = lora is None
        self.train_tower = train_tower
        self.optim = check_kind(optim, Optim, f"{KEYS}.optim") or Optim()
        self.compute = check_kind(compute, Compute, f"{KEYS}.compute") or Compute()
        self.temperature = temperature
        self.variance_proxy = variance_proxy
        self.run_id = ""  # created in a run's first fit and stored in its checkpoints
        self.made_of: dict[str, Any] = {}  # settings, checksum of the base weights, and versions of the run
        self.sequence_group: SequenceGroup | None = None
        self.steps = Steps(self.optim)
        self.recent_episodes = RecentEpisodes()
        self.resume_with_changes: Sequence[str] = ()  # keys whose values may differ from those of the checkpoint
        self.clock = StageClock()
        self._stop_requested = False  # whether the run stops after the current iteration
        self.further_needs = Needs()  # needs of callbacks
        self.validation_metrics = EpisodeMetrics()
        self._rollout_metrics: dict[str, float] = {}  # metrics of the current rollout

    # Methods to override

    @property
    def needs(self) -> Needs:
        """Quantities to compute for a rollout. Override this property with ``super().needs | Needs(...)``."""
        return self.further_needs | Needs(
            old_logps=self.correction is not None and self.correction.needs_old_logps,
            values=self.critic is not None,
            sum_pi_squared=self.advantage.needs_sum_pi_squared or self.variance_proxy,
            greedy_baseline=self.advantage.needs_greedy_baseline,
            forks=self.advantage.needs_forks,
        )

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        """Return token rewards [B, A] for the estimator; by default the environment's rewards with penalties.

        ``rollout.scores`` contains only the scores that :attr:`needs` declares.
        """
        return rollout.rewards

    @property
    def takes_kl_from_rewards(self) -> bool:
        """Whether :meth:`shape_rewards` subtracts a KL, so that returns can be negative."""
        return False

    @abstractmethod
    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        """Return the policy loss per action token [B, A].

        Args:
            batch: rows of a micro-batch; ``batch.scores`` are from before the update.
            scores: log-probs and entropies of the current weights, with gradients.
        """

    @abstractmethod
    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        """Return the value loss per action token [B, A].

        Args:
            batch: rows of a micro-batch; ``batch.scores.values`` are from before the update.
            values: values [B, A] of the current weights, with gradients.
        """

    @property
    def reference(self) -> str:
        """Hub id or folder of the reference model, which is loaded if :attr:`needs` declares ``ref_logps``."""
        return self.model

    def update_metrics(self, batch: Rollout, scores: CurrentScores) -> dict[str, Tensor]:
        """Return metrics per token [B, A] by name, to be averaged over the mini-batch's trained tokens and logged."""
        return {}

    def pick_tokens(self, batch: Rollout, logps: Tensor) -> Tensor | None:
        """Return a mask [B, A] (bool) of tokens that the policy loss treats differently, available as ``batch.picked``.

        Called if ``needs.mini_batch_logps`` is set, which costs one more forward pass in each step but the first.

        Args:
            batch: a whole mini-batch.
            logps: log-probs [B, A] of the current weights, without gradients.
        """
        return None

    # Iteration, part 1: from a raw rollout to advantages (called by the stream)

    def prepare(self, rollout: Rollout) -> Prepared:
        """Prepare a rollout for training: score, correct, shape rewards, estimate advantages, select rows, get metrics.

        If the rollout was scored before, log-probs are kept and values are computed again.

        Returns:
            The rows to train on, and metrics to log with the first step; subclasses may add metrics.
        """
        collected_now, groups = not rollout.scored, self.datamodule.groups
        with scoring(self, rollout):
            rollout = self.score(rollout)
        rollout = corrected(rollout, self.correction, self.ranks.sum)
        with naming_missing(rollout.scores):
            rollout = rollout.union(shaped_rewards=self.shape_rewards(rollout))
        rollout, faulty_B, faults = without_not_finite(rollout)
        # Exclude rows in which an environment failed.
        lost_B = lost_rows(rollout, self.advantage.needs_values, None if groups is None else groups.size)
        advantages, returns = estimated(self.advantage, without_rows(rollout, lost_B), self.ranks.sum)
        rollout = rollout.union(advantages=advantages, returns=returns)
        rollout, chosen = select(self, rollout, faulty_B, lost_B)
        with self.clock.stage("log"):
            metrics = describe_prepared(self, rollout, faulty_B, faults, lost_B, chosen)
            if collected_now:
                metrics |= describe_collected(self, rollout)
                show_rollout(self, rollout)
        metrics |= follow_returns(self.critic, metrics)
        return Prepared(chosen, metrics)

    def score(self, rollout: Rollout) -> Rollout:
        """Add the scores of actor, reference and critic that are needed and missing."""
        return score_rollout(self.models, rollout, needs_before_update(self), self.reader)

    # Iteration, part 2: one optimizer step

    def training_step(self, batch: MiniBatch, batch_idx: int) -> dict[str, Tensor]:
        """Compute the gradient, let guards decide, step, log; return the sum of the mean losses for callbacks."""
        rollout, first = batch.rollout, batch_idx == 0
        if first:
            self._rollout_metrics = batch.metrics
        total = self.datamodule.steps_per_iteration * len(rollout)
        with self.clock.stage("update", total, done=batch_idx * len(rollout)):
            gradient = compute_gradient(self, rollout, first)
            attempt = Attempt(self.policy_version, batch_idx, gradient.means, gradient.norms, self._rollout_metrics)
            taken = self.steps.allow(self.trainer, attempt, gradient.fault)
            norms = take_step(self, gradient, taken, first)
        self.clock.count("update", turns=len(rollout.turns), tokens=rollout.tokens)
        metrics = describe_step(self, rollout, gradient.means, norms, taken)
        self.log_dict(metrics | batch.metrics, on_step=False, on_epoch=True)
        return {"loss": gradient.loss}

    def on_train_batch_end(self, outputs: Any, batch: MiniBatch, batch_idx: int) -> None:
        self._stop_between_iterations(self.trainer.is_last_batch)

    def _stop_between_iterations(self, iteration_done: bool) -> None:
        """Delay a stop requested inside an iteration until the iteration ends, since a run resumes only from there."""
        self._stop_requested |= self.trainer.should_stop
        self.trainer.should_stop = self._stop_requested and iteration_done

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log as in Lightning, but weight all values of an iteration equally, since a mini-batch has no batch size."""
        if kwargs.get("batch_size") is None:
            kwargs["batch_size"] = 1
        super().log(name, value, *args, **kwargs)

    def on_train_epoch_start(self) -> None:
        self._stop_between_iterations(iteration_done=False)
        self.clock.read()  # discard the time between two iterations
        assert self.datamodule.stream is not None
        self.datamodule.stream.begin_iteration()  # called in a hook, so that the stream's methods may log

    def on_train_epoch_end(self) -> None:
        times = over_ranks(self.clock.read(self.trainer.world_size))
        if "time/update_seconds" in times:  # the time is absent when a resumed run ends its last epoch once more
            self.log_dict(times)
            self.steps.step_scheduler(self, "epoch", self.trainer.current_epoch + 1)

    # Validation

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_metrics.update(play_held_out(self, batch.seeds))

    def on_validation_epoch_end(self) -> None:
        if not self.validation_metrics.update_called:  # no validation was due
            return
        numbers = {f"val/{name}": value for name, value in self.validation_metrics.compute().items()}
        self.validation_metrics.reset()
        self.log_dict(numbers)

    # Building: Lightning's hooks in the order in which they are called

    def configure_callbacks(self) -> Sequence[L.Callback] | L.Callback:
        """Set the rank before loggers open files, refuse unsupported callbacks before setup, and add EngineCheck."""
        # Lightning reads the rank from environment variables, which may be stale, and corrects it for strategies of
        # several processes only.
        cast(Any, rank_zero_only).rank = self.trainer.global_rank
        if self.trainer.state.fn == TrainerFn.FITTING:
            check_keys(self.trainer)
            if not any(isinstance(callback, EngineCheck) for callback in cast(Any, self.trainer).callbacks):
                return [EngineCheck()]
        return []

    def setup(self, stage: str) -> None:
        """Refuse incompatible settings before weights are read, which can take minutes."""
        # Logged numbers are already reduced over ranks, so Lightning's advice to set sync_dist does not apply.
        warnings.filterwarnings("ignore", message=r".*It is recommended to use `self\.log.*sync_dist=True.*")
        with raise_once():
            check_run(self, stage)
            check_mesh(self.trainer.strategy)
            prepare_strategy(self.trainer)
            self.tokenizer, self.image_reader, self.context_length = readers_for(self)
            self.datamodule.check(self.tokenizer, self.context_length, self.image_reader)
        if stage == "fit":
            choose_correction(self)
            begin_run(self)
            self._stop_requested = False

    def configure_model(self) -> None:
        """Build actor, critic and reference once the strategy is set up; later calls keep these models."""
        # Create the group again in each fit, since a fit may have new process groups.
        self.sequence_group = sequence_group_for(self)
        if hasattr(self, "models"):
            check_rounded(self)
            return
        self.models = models_for(self)
        self.actor = self.models.actor  # the actor is registered before the critic, as in the optimizer's groups
        if self.critic is not None:
            self._modules["critic"] = self._modules.pop("critic")
        check_sharded(self)

    def configure_optimizers(self) -> Any:
        """Return AdamW and its scheduler; a subclass may return another optimizer, with or without a scheduler."""
        return self.steps.configure(self)

    def on_fit_start(self) -> None:
        self.steps.check_optimizer(self.trainer)
        self._connect()

    def on_validation_start(self) -> None:
        if not self.datamodule.validation_due:
            return
        self._connect()
        self.validation_metrics = EpisodeMetrics(self.datamodule.pool.names).to(self.device)

    def on_train_start(self) -> None:
        """Set learning rates and weight decay from the configuration, also in a resumed run."""
        self.steps.begin(self)
        if (template := self.datamodule.player.renderer.template).writes_date:
            rank_zero_info(f"{template.name} writes the date, which is {self.datamodule.date.now:%Y-%m-%d} in this run")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights by name, without those that LoRA freezes, which the base model has."""
        weights = super().state_dict(*args, **kwargs)
        frozen = {} if self.lora is None else frozen_weights(self)
        return {name: weight for name, weight in weights.items() if name not in frozen}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        save_agent(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        load_agent(self, checkpoint)

    def settings(self) -> dict[str, Any]:
        """Return the run's settings by config key, in serializable form, to compare them when the run is resumed."""
        return settings_of(self)

    # Properties for the data module, the engine and callbacks

    @property
    def datamodule(self) -> RolloutDataModule:
        return cast(RolloutDataModule, cast(Any, self.trainer).datamodule)

    @property
    def phase(self) -> Phase:
        """Phase of the iteration: ``critic_warmup`` trains only the critic, ``train`` trains everything."""
        return self.datamodule.phase

    @property
    def ranks(self) -> Ranks:
        """Collective operations over the processes of the run."""
        return Ranks(self.device, self.trainer.world_size)

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps attempted so far, including steps skipped by guards (unlike ``global_step``)."""
        return self.steps.attempts

    def _connect(self) -> None:
        if (reference := self.models.reference) is not None:
            kept = self.lora is not None or self.models.rounded  # whether the reference has its final dtype
            reference.to(self.device, dtype=None if kept else self.actor.lm.dtype)
        self.reader = reader_for(self)
        connection = Connection(
            policy_handle(self),
            self.prepare,
            lambda: self.policy_version,
            lambda: self.steps.held(self.trainer),
            self.clock,
            self.temperature,
            partial(show_engine, self),
            self.needs.greedy_baseline,
            self.needs.forks,
        )
        self.datamodule.connect(connection)
