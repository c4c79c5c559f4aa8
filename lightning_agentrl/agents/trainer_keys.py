"""Keys of Lightning's Trainer, and callbacks of Lightning, that are refused: they would act inside an iteration, on an
optimizer or a loader that they do not know, or on nothing.
"""

from __future__ import annotations

from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_agentrl.errors import ConfigError

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
_CUTS = (
    "would drop mini-batches of a collected rollout; remove it and set data.init_args.num_envs, turns_per_env or "
    "mini_batch_turns, or data.init_args.groups"
)
_SAVES = "would save inside an iteration, whose rollout is not in a checkpoint; RunCheckpoints saves after each"
_OPTIMIZER = "changes the optimizer, and gradients, rates and steps are the agent's own here; "
CALLBACKS = {  # by name, since not all versions of Lightning have all
    "StochasticWeightAveraging": _OPTIMIZER
    + "let the rates fall with model.init_args.optim.schedule, and keep the best checkpoint with RunCheckpoints",
    "WeightAveraging": "copies the agent with its engine and data; keep the best checkpoint with RunCheckpoints",
    "GradientAccumulationScheduler": _OPTIMIZER
    + "set data.init_args.mini_batch_turns and model.init_args.compute.max_tokens_per_micro_batch",
    "LearningRateFinder": "would train on rollouts that the run then repeats; set model.init_args.optim.lr_actor and "
    "model.init_args.optim.lr_critic",
    "BatchSizeFinder": "changes a batch size, and the agent has none; set data.init_args.mini_batch_turns and "
    "model.init_args.compute.max_tokens_per_micro_batch",
    "BaseFinetuning": _OPTIMIZER + "train adapters with model.init_args.lora",
    "ModelPruning": "changes weights that the engine then does not sample with",
    "OnExceptionCheckpoint": _SAVES,
    "SpikeDetection": "reads the one loss that a training step returns, and the agent returns none; use GradientSpikes",
}


def no_precision(precision: str) -> str:
    """Return why a precision is refused."""
    return (
        f"trainer.precision '{precision}' is not supported (scaled gradients would break clipping); use one of "
        f"{', '.join(PRECISIONS)}"
    )


def check_keys(trainer: L.Trainer) -> None:
    """Refuse what the agent cannot do, given by a config or in Python.

    Raises:
        ValueError: one sentence with the key to change.
    """
    for name, wrong, why in _rules(trainer):
        if wrong:
            raise ValueError(f"trainer.{name} {why}")
    check_callbacks(trainer)


def check_callbacks(trainer: L.Trainer) -> None:
    """Refuse callbacks of Lightning that would act on what they do not know.

    Raises:
        ValueError: one sentence with what to use.
    """
    for callback in getattr(trainer, "callbacks", []):
        kinds = [kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in CALLBACKS]
        if kinds:
            raise ValueError(f"{type(callback).__name__} {CALLBACKS[kinds[0]]} (key trainer.callbacks)")
        if isinstance(callback, ModelCheckpoint) and callback.save_on_exception:
            raise ValueError(f"save_on_exception of {type(callback).__name__} {_SAVES} (key trainer.callbacks)")


def refuse_foreign_keys(trainer: Any) -> None:
    """Refuse the Trainer's own clipping and accumulation, and name the keys that do it here.

    Args:
        trainer: its arguments by name; Lightning would refuse some of them in its own words, and replace others.

    Raises:
        ConfigError: one sentence with the key to change.
    """
    precision = str(trainer.get("precision"))
    if precision in ("16", "16-mixed", "16-true"):  # on a CPU, Lightning would replace it
        raise ConfigError(no_precision(precision))
    if trainer.get("barebones"):
        raise ConfigError("trainer.barebones would log nothing, save nothing and show nothing; remove it")
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


def _rules(trainer: L.Trainer) -> list[tuple[str, bool, str]]:
    """Return keys, whether their value cannot be used, and why as the rest of a sentence."""
    given: Any = cast(Any, trainer)
    interval, every = getattr(given, "val_check_interval", None), given.check_val_every_n_epoch  # none, if timed
    part = isinstance(given.limit_val_batches, float) and given.limit_val_batches not in (0.0, 1.0)
    return [
        ("fast_dev_run", bool(given.fast_dev_run), "would cut an iteration into pieces; set trainer.max_epochs to 1"),
        ("overfit_batches", given.overfit_batches != 0, _CUTS),
        ("limit_train_batches", _is_not_all(given.limit_train_batches), _CUTS),
        (
            "val_check_interval",
            not (isinstance(interval, float) and interval == 1.0),
            "would validate inside an iteration; remove it and set trainer.check_val_every_n_epoch, the number of "
            "iterations between validations",
        ),
        (
            "check_val_every_n_epoch",
            every is None or every < 1,
            f"is the number of iterations between validations and must be at least 1, got {every}; for none, give a "
            "number above trainer.max_epochs, or trainer.limit_val_batches 0",
        ),
        (
            "limit_val_batches",
            part,
            "cannot be a part, since all held-out episodes are one batch; remove it and set "
            "data.init_args.validation.episodes",
        ),
        *(
            (name, _is_not_all(getattr(given, name)), "limits nothing, since agents have no such loop; remove it")
            for name in ("limit_test_batches", "limit_predict_batches")
        ),
        ("min_steps", bool(given.min_steps), "would stop inside an iteration; remove it and set trainer.min_epochs"),
        (
            "reload_dataloaders_every_n_epochs",
            given.reload_dataloaders_every_n_epochs != 0,
            "would begin the stream of rollouts anew; remove it, since each iteration collects anyway",
        ),
        (
            "model_registry",
            given._model_registry is not None,
            "is not supported; remove it and write the model with agentrl export",
        ),
    ]


def _is_not_all(limit: float) -> bool:
    return isinstance(limit, int) or limit != 1.0  # 1 is one batch, 1.0 is all
