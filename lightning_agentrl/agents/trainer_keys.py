"""Arguments and callbacks of Lightning's Trainer that would act inside an iteration, and what to use in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lightning_agentrl.errors import ConfigError

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
_VALIDATION = "set data.init_args.validation.every, the number of iterations between validations, and remove it"
_CUTS = (
    "would drop mini-batches of a collected rollout; remove it and set data.init_args.num_envs, turns_per_env or "
    "mini_batch_turns, or data.init_args.groups"
)
_OPTIMIZER = "changes the optimizer, and gradients, rates and steps are the agent's own here; "
CALLBACKS = {  # by name, since some versions of Lightning lack some
    "StochasticWeightAveraging": _OPTIMIZER
    + "let the rates fall with model.init_args.optim.schedule, and keep the best checkpoint with RunCheckpoints",
    "WeightAveraging": "copies the agent with its engine and data; keep the best checkpoint with RunCheckpoints",
    "LearningRateFinder": "would train on rollouts that the run then repeats; set model.init_args.optim.lr_actor and "
    "model.init_args.optim.lr_critic",
    "BatchSizeFinder": "changes a batch size, and the agent has none; set data.init_args.mini_batch_turns and "
    "model.init_args.compute.max_tokens_per_micro_batch",
    "BaseFinetuning": _OPTIMIZER + "train adapters with model.init_args.lora",
    "ModelPruning": "changes weights that the engine then does not sample with",
}


def no_precision(precision: str) -> str:
    """Return why a precision is refused."""
    return (
        f"trainer.precision '{precision}' is not supported (scaled gradients would break clipping); use one of "
        f"{', '.join(PRECISIONS)}"
    )


def refuse_foreign_keys(trainer: Mapping[str, Any]) -> None:
    """Refuse clipping, accumulation and 16-bit floats of the Trainer, whose own errors do not name the agent's keys.

    Args:
        trainer: arguments of the Trainer by name.

    Raises:
        ConfigError: one sentence with the key to change.
    """
    precision = str(trainer.get("precision"))
    if precision in ("16", "16-mixed", "16-true"):  # on a CPU, Lightning would replace it
        raise ConfigError(no_precision(precision))
    for key in ("gradient_clip_val", "gradient_clip_algorithm"):
        if trainer.get(key) is not None:
            raise ConfigError(
                f"trainer.{key} cannot be used, gradients are clipped per parameter group here: remove it and set "
                "model.init_args.optim.max_grad_norm_actor and model.init_args.optim.max_grad_norm_critic"
            )
    if trainer.get("accumulate_grad_batches") not in (None, 1):
        raise ConfigError(
            "trainer.accumulate_grad_batches cannot be used, mini-batches are split into micro-batches here: "
            "remove it and set data.init_args.mini_batch_turns (turns per optimizer step) and "
            "model.init_args.compute.max_tokens_per_micro_batch (memory)"
        )


def check_keys(trainer: L.Trainer) -> None:
    """Refuse arguments and callbacks of the Trainer that would act inside an iteration.

    Raises:
        ValueError: one sentence with the key to change.
    """
    given: Any = cast(Any, trainer)
    if given.overfit_batches:
        raise ValueError(f"trainer.overfit_batches {_CUTS}")
    if _is_not_all(given.limit_train_batches) and not given.fast_dev_run:
        raise ValueError(f"trainer.limit_train_batches {_CUTS}")
    if _is_not_all(getattr(given, "val_check_interval", None)):  # none, if it is a time
        raise ValueError(f"trainer.val_check_interval would validate inside an iteration; {_VALIDATION}")
    if (every := given.check_val_every_n_epoch) is None or every < 1:
        raise ValueError(f"trainer.check_val_every_n_epoch must be at least 1, got {every}; {_VALIDATION}")
    if every > 1:
        rank_zero_warn(
            f"trainer.check_val_every_n_epoch is {every}, so Lightning's ModelCheckpoint and EarlyStopping act only "
            f"after validations, unless they have save_on_train_epoch_end and check_on_train_epoch_end; {_VALIDATION}"
        )
    for callback in given.callbacks:
        kinds = [kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in CALLBACKS]
        if kinds:
            raise ValueError(f"{type(callback).__name__} {CALLBACKS[kinds[0]]} (key trainer.callbacks)")


def _is_not_all(batches: float | None) -> bool:
    return batches is None or isinstance(batches, int) or batches != 1.0  # 1 is one batch, 1.0 is all
