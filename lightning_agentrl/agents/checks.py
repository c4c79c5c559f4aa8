"""Checks that the settings of agent, data module and trainer are compatible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import lightning as L
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_agentrl.advantages import AdvantageEstimator
from lightning_agentrl.agents.optim import check_schedules, planned_steps
from lightning_agentrl.agents.sharding import check_strategy, in_lockstep, trainer_of
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses import AggregationMode, GroupFilter, TruncatedWeights
from lightning_agentrl.models.critic import Critic
from lightning_agentrl.models.families import FAMILIES, Family, text_family, why_unshared
from lightning_agentrl.models.kernels import check_kernels, slow_in_bfloat16
from lightning_agentrl.models.loading import read_config
from lightning_agentrl.models.sequence import head_counts, shares_heads
from lightning_agentrl.rollout import GroupRollout, Interaction, TurnInteraction

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
_VALIDATION = "set data.init_args.validation.every, the number of iterations between validations, and remove it"
_CUTS = (
    "would drop mini-batches of a collected rollout; remove it and set data.init_args.num_envs, turns_per_env or "
    "mini_batch_turns, or data.init_args.groups"
)
_COMPUTE = "model.init_args.compute"
_OPTIMIZER = "changes the optimizer, but the agent controls gradients, learning rates and steps; "
CALLBACKS = {  # unsupported callbacks, by class name since some versions of Lightning lack some of these classes
    "StochasticWeightAveraging": _OPTIMIZER
    + "let the rates fall with model.init_args.optim.schedule, and keep the best checkpoint with RunCheckpoints",
    "WeightAveraging": "copies the agent with its engine and data; keep the best checkpoint with RunCheckpoints",
    "LearningRateFinder": "would train on rollouts that the run then repeats; set model.init_args.optim.lr_actor and "
    "model.init_args.optim.lr_critic",
    "BatchSizeFinder": "changes a batch size, and the agent has none; set data.init_args.mini_batch_turns and "
    "model.init_args.compute.max_tokens_per_micro_batch",
    "BaseFinetuning": _OPTIMIZER + "train adapters with model.init_args.lora",
    "ModelPruning": "changes weights without sending them to the engine; remove it",
}


def check_run(agent: Any, stage: str, on_gpu: bool | None = None) -> None:
    """Refuse incompatible settings before weights are read.

    Args:
        agent: an ``Agent`` that is attached to a trainer.
        stage: Lightning's stage, such as ``fit``.
        on_gpu: whether the run uses a GPU; None: taken from the trainer's accelerator.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    trainer, data = agent.trainer, agent.trainer.datamodule
    if data is None:
        raise ValueError("an agent needs a RolloutDataModule; pass it to the trainer: trainer.fit(agent, data)")
    if "training_step" in vars(agent):  # Lightning sets this when it unwraps a compiled module
        raise ValueError(
            "an agent cannot be compiled as a whole: pass it to the trainer without torch.compile, and set "
            "model.init_args.compute.kernels to compiled to compile the layers of its models"
        )
    if stage == "fit":
        advantage, takes_kl = agent.advantage, agent.takes_kl_from_rewards
        check_trainer(trainer, data.steps_per_iteration, agent.lora is not None)
        check_schedules(agent.optim.schedule, planned_steps(trainer))
        check_tower(agent.train_tower, agent.model, agent.lora is not None)
        check_critic(agent.critic, trainer.strategy)
        check_sequence(agent)
        check_groups(advantage, data.groups, agent.group_filter, agent.aggregation)
        check_forks(advantage, data.groups, data.interaction, takes_kl)
        check_returns(advantage, takes_kl, data.interaction)
        warn_of_kl_in_groups(advantage, takes_kl, agent.group_filter)
    if agent.lora is not None:
        agent.lora.check(agent.model)
    on_gpu = isinstance(trainer.accelerator, CUDAAccelerator) if on_gpu is None else on_gpu
    check_kernels(agent.compute.kernels, on_gpu, in_lockstep(trainer.strategy))
    if not on_gpu and isinstance(trainer.accelerator, CPUAccelerator) and (slow := slow_in_bfloat16(trainer.precision)):
        rank_zero_warn(slow)


def check_trainer(trainer: L.Trainer, steps_per_iteration: int, lora: bool = False) -> None:
    """Refuse unsupported precisions, strategies and keys, and a ``max_steps`` that would stop inside an iteration.

    Args:
        trainer: trainer whose strategy may or may not be set up.
        steps_per_iteration: optimizer steps per iteration.
        lora: whether adapters are trained.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    if trainer.precision not in PRECISIONS:
        raise ValueError(no_precision(trainer.precision))
    check_strategy(trainer, lora)
    if not isinstance(saves := trainer.strategy.checkpoint_io, TorchCheckpointIO):
        raise ValueError(
            f"{type(saves).__name__} does not report when a checkpoint is complete; remove it from trainer.plugins"
        )
    check_keys(trainer)
    if trainer.max_steps > 0 and trainer.max_steps % steps_per_iteration and not cast(Any, trainer).fast_dev_run:
        raise ValueError(
            f"trainer.max_steps {trainer.max_steps} would stop inside an iteration of {steps_per_iteration} optimizer "
            "steps; set a multiple of it, or use trainer.max_epochs"
        )


def check_tower(train_tower: bool, model: str, lora: bool) -> None:
    """Refuse to train a vision tower if the model has none, or if LoRA freezes everything but adapters.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    key = "model.init_args.train_tower"
    if train_tower and lora:
        raise ValueError(
            f"LoRA trains adapters on the text model only; set {key} to false, or remove model.init_args.lora"
        )
    if train_tower and FAMILIES.get(read_config(model).model_type, Family()).reader is None:
        raise ValueError(f"the model '{model}' reads text only, so it has no tower to train; set {key} to false")


def check_critic(critic: Critic | None, strategy: Strategy) -> None:
    """Refuse critics that change weights outside the optimizer under ZeRO, which keeps copies of the weights.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    if critic is None or not isinstance(strategy, DeepSpeedStrategy):
        return
    if critic.fitted:
        raise ValueError(
            f"{type(critic).__name__} does not work with DeepSpeedStrategy, which cannot step without a gradient; "
            "use SharedCritic or SeparateCritic (key model.init_args.critic), or trainer.strategy 'ddp' or "
            "ModelParallelStrategy"
        )
    if getattr(critic, "popart", None) is not None:
        raise ValueError(
            "model.init_args.critic.init_args.popart does not work with DeepSpeedStrategy, which keeps copies of the "
            "weights that are rescaled; remove it, or use trainer.strategy 'ddp' or ModelParallelStrategy"
        )


def check_sequence(agent: Any) -> None:
    """Refuse sequence parallelism that the number of ranks, the strategy or one of the models does not support.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    parts, key = agent.compute.sequence_parallel, f"{_COMPUTE}.sequence_parallel"
    world = agent.trainer.num_devices * agent.trainer.num_nodes
    if parts == 1:
        return
    if world % parts:
        raise ValueError(
            f"{key} {parts} needs a multiple of {parts} processes, and the run has {world}; change trainer.devices or "
            "trainer.num_nodes, or set it to 1"
        )
    if isinstance(agent.trainer.strategy, DeepSpeedStrategy):
        raise ValueError(f"{key} {parts} under DeepSpeedStrategy is not supported; use 'ddp' or ModelParallelStrategy")
    reference = agent.reference if agent.needs.ref_logps else None
    names = dict.fromkeys((agent.model, getattr(agent.critic, "model", None), reference))
    configs = {name: read_config(name) for name in names if name is not None}
    for name, config in configs.items():
        family, unshared = text_family(config), why_unshared(config)
        if family is None or not family.engine_shares or unshared:
            states = "recurrent or convolution layers"
            raise ValueError(f"the model '{name}' has {unshared or states}, so {key} must be 1")
    if not all(shares_heads(config, parts) for config in configs.values()):
        sizes = [n for n in range(1, world + 1) if world % n == 0 and all(shares_heads(c, n) for c in configs.values())]
        heads = ", ".join(f"'{name}': {head_counts(config)}" for name, config in configs.items())
        raise ValueError(
            f"{key} {parts} cannot divide the attention heads equally ({heads}); with {world} processes it can be "
            f"{' or '.join(map(str, sizes))}"
        )


def check_rounded(agent: Any) -> None:
    """Refuse to use an agent without autocast if an earlier run under autocast has rounded its frozen weights.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    trainer = trainer_of(agent)
    reads_rounded = agent.lora is not None or (trainer is not None and trainer.state.fn == TrainerFn.FITTING)
    if agent.models.rounded and reads_rounded and trainer is not None and trainer.precision != "bf16-mixed":
        raise ValueError(
            "the frozen weights of this agent were rounded for an earlier run with trainer.precision bf16-mixed, so a "
            f"run with {trainer.precision} needs a new agent"
        )


def check_groups(
    advantage: AdvantageEstimator,
    groups: GroupRollout | None,
    group_filter: GroupFilter | None,
    aggregation: AggregationMode,
) -> None:
    """Refuse estimators, filters and aggregations that compare episodes of a group if rollouts have no groups.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    name = type(advantage).__name__
    if groups is None and (advantage.needs_groups or advantage.needs_greedy_baseline):
        what = "several episodes" if advantage.needs_groups else "a greedy episode"
        raise ValueError(
            f"{name} needs {what} from each start state; set data.init_args.groups, for example to "
            "{size: 8, per_rollout: 16}, or change model.init_args.advantage"
        )
    if groups is None and group_filter is not None:
        raise ValueError(
            f"{type(group_filter).__name__} selects groups of episodes; set data.init_args.groups, or remove "
            "model.init_args.group_filter"
        )
    if groups is None and aggregation == "prompt-mean":
        raise ValueError(
            "aggregation prompt-mean is a mean over groups of episodes; set data.init_args.groups, for example to "
            "{size: 8, per_rollout: 16}, or change model.init_args.policy_loss.init_args.aggregation"
        )
    if groups is not None and groups.size == 1 and advantage.needs_groups:
        raise ValueError(
            f"{name} compares the episodes of a group, and data.init_args.groups.size is 1; set at least 2"
        )


def check_forks(
    advantage: AdvantageEstimator, groups: GroupRollout | None, interaction: Interaction, kl_in_reward: bool
) -> None:
    """Refuse forks if the interaction cannot restore a state, or if branches and rollout would not be comparable.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    if advantage.needs_forks is None:
        return
    name, other = type(advantage).__name__, ", or change model.init_args.advantage"
    if not interaction.forks:
        raise ValueError(
            f"{name} starts branches from states of the rollout, and {type(interaction).__name__} cannot restore "
            f"states; use TurnInteraction (key data.init_args.interaction){other}"
        )
    if groups is not None and groups.ahead:
        raise ValueError(
            f"{name} forks turns right after their rollout, and groups that are begun ahead end in a later one; set "
            f"data.init_args.groups.ahead to 0{other}"
        )
    if isinstance(interaction, TurnInteraction) and interaction.ask_again:
        raise ValueError(
            f"{name} values the states before steps of the environment, and a turn whose reply is requested again has "
            f"no step; set data.init_args.interaction.init_args.ask_again to 0{other}"
        )
    if kl_in_reward:
        raise ValueError(
            f"{name} compares rewards with those of branches, which have no KL; set model.init_args.kl.reward to 0 and "
            f"use model.init_args.kl.loss{other}"
        )


def check_returns(advantage: AdvantageEstimator, kl_in_reward: bool, interaction: Interaction) -> None:
    """Refuse penalties that make returns negative if the estimator needs returns of at least 0.

    Args:
        advantage: the estimator.
        kl_in_reward: whether a KL is subtracted from rewards.
        interaction: interaction that may subtract a penalty for invalid replies.

    Raises:
        ValueError: the settings are not supported; the message names the keys to change.
    """
    penalty = isinstance(interaction, TurnInteraction) and interaction.invalid_penalty > 0
    keys = [
        *["model.init_args.kl.reward"] * kl_in_reward,
        *["data.init_args.interaction.init_args.invalid_penalty"] * penalty,
    ]
    if advantage.needs_nonnegative_scores and keys:
        raise ValueError(
            f"{type(advantage).__name__} needs returns of at least 0; set {' and '.join(keys)} to 0, or change "
            "model.init_args.advantage"
        )


def warn_of_kl_in_groups(advantage: AdvantageEstimator, kl_in_reward: bool, group_filter: GroupFilter | None) -> None:
    """Warn if the estimator would scale up a KL in the reward in groups whose episodes have equal returns."""
    if advantage.divide_by_std and kl_in_reward and group_filter is None:
        rank_zero_warn(
            f"{type(advantage).__name__} divides by the standard deviation of each group, so if all episodes of one "
            "have the same return, the KL in the reward alone gives them full-size advantages; put the KL into the "
            "loss (model.init_args.kl: {reward: 0, loss: 0.001}), or drop such groups (model.init_args.group_filter: "
            "DropEqualScores)"
        )


def choose_correction(agent: Any) -> None:
    """Use ``TruncatedWeights`` if rollouts are sampled with older weights and no correction is configured."""
    if agent.correction is agent.chosen_correction:  # an earlier run has chosen this correction
        agent.correction = None
    staleness = agent.datamodule.max_staleness
    if agent.correction is None and staleness > 0:
        agent.correction = agent.chosen_correction = TruncatedWeights()
        rank_zero_info(
            f"rollouts are collected ahead (data.init_args.max_staleness {staleness}), so tokens are weighted by "
            "TruncatedWeights; to change this, set model.init_args.correction, for example to NoCorrection"
        )


def no_precision(precision: str) -> str:
    """Return the error message for an unsupported precision."""
    return (
        f"trainer.precision '{precision}' is not supported (scaled gradients would break clipping); use one of "
        f"{', '.join(PRECISIONS)}"
    )


def refuse_foreign_keys(trainer: Mapping[str, Any]) -> None:
    """Refuse the Trainer's clipping, accumulation and float16, since Lightning's errors do not name the agent's keys.

    Args:
        trainer: arguments of the Trainer by name.

    Raises:
        ConfigError: the settings are not supported; the message names the key to change.
    """
    precision = str(trainer.get("precision"))
    if precision in ("16", "16-mixed", "16-true"):  # on a CPU, Lightning would silently replace float16
        raise ConfigError(no_precision(precision))
    for key in ("gradient_clip_val", "gradient_clip_algorithm"):
        if trainer.get(key) is not None:
            raise ConfigError(
                f"trainer.{key} cannot be used, since gradients are clipped per parameter group: remove it and set "
                "model.init_args.optim.max_grad_norm_actor and model.init_args.optim.max_grad_norm_critic"
            )
    if trainer.get("accumulate_grad_batches") not in (None, 1):
        raise ConfigError(
            "trainer.accumulate_grad_batches cannot be used, since mini-batches are split into micro-batches: "
            "remove it and set data.init_args.mini_batch_turns (turns per optimizer step) and "
            "model.init_args.compute.max_tokens_per_micro_batch (memory)"
        )


def check_keys(trainer: L.Trainer) -> None:
    """Refuse arguments and callbacks of the Trainer that would interfere with an iteration.

    Raises:
        ValueError: the settings are not supported; the message names the key to change.
    """
    given: Any = cast(Any, trainer)
    if given.overfit_batches:
        raise ValueError(f"trainer.overfit_batches {_CUTS}")
    if _is_not_all(given.limit_train_batches) and not given.fast_dev_run:
        raise ValueError(f"trainer.limit_train_batches {_CUTS}")
    # Lightning does not set this attribute for a time interval.
    if _is_not_all(getattr(given, "val_check_interval", None)):
        raise ValueError(f"trainer.val_check_interval would validate inside an iteration; {_VALIDATION}")
    if (every := given.check_val_every_n_epoch) is None or every < 1:
        raise ValueError(f"trainer.check_val_every_n_epoch must be at least 1, got {every}; {_VALIDATION}")
    if every > 1:
        rank_zero_warn(
            f"trainer.check_val_every_n_epoch is {every}, so Lightning's ModelCheckpoint and EarlyStopping run only "
            f"after validations, unless save_on_train_epoch_end and check_on_train_epoch_end are set; {_VALIDATION}"
        )
    for callback in given.callbacks:
        kinds = [kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in CALLBACKS]
        if kinds:
            raise ValueError(f"{type(callback).__name__} {CALLBACKS[kinds[0]]} (key trainer.callbacks)")


def _is_not_all(batches: float | None) -> bool:
    return batches is None or isinstance(batches, int) or batches != 1.0  # 1 means one batch, 1.0 means all
