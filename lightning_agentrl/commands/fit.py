"""`agentrl fit` and `agentrl validate`: LightningCLI with defaults, checks and error messages for agents."""

from __future__ import annotations

import logging
import os
import re
import sys
from argparse import ArgumentError
from enum import Enum
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

from lightning_agentrl import advantages, engines, losses  # noqa: F401 - a config may name their classes
from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.checkpoint import exists
from lightning_agentrl.agents.checks import refuse_foreign_keys
from lightning_agentrl.callbacks.run_checkpoints import WORDS, CheckpointedTrainer, named_checkpoint
from lightning_agentrl.callbacks.run_folder import RunRecord
from lightning_agentrl.callbacks.trainer import DEFAULTS, with_defaults
from lightning_agentrl.commands.files import with_shipped_configs
from lightning_agentrl.commands.guarded import guarded
from lightning_agentrl.commands.held_out_table import held_out_table
from lightning_agentrl.commands.memory import Place
from lightning_agentrl.commands.plan import RunPlan, planned_trainer
from lightning_agentrl.errors import ConfigError, Problem, one_line
from lightning_agentrl.errors.config_errors import (
    OPTIONS,
    Given,
    check_arguments,
    config_problem,
    constructor_problem,
    options_of,
)
from lightning_agentrl.errors.secrets import check_secrets
from lightning_agentrl.rollout import RolloutDataModule


class AgentParser(LightningArgumentParser):
    """LightningArgumentParser that also accepts `null` for keys of a class on the command line."""

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse options. An inner parser gets the keys of a class as Python text, in which null has become `None`."""
        args = args and [re.sub(r"^(--[^=]+=)None$", r"\1null", argument) for argument in args]
        return super().parse_args(args, *rest, **kwargs)


class AgentCLI(LightningCLI):
    """LightningCLI with agent and data module by class_path, defaults for agents, and errors in one sentence.

    ``settings`` holds the parsed keys, of the subcommand if there is one. ``start`` holds the objects that were built
    from these keys, and the checkpoint to start from.
    """

    model: Agent
    datamodule: RolloutDataModule
    config: Any
    place: Place | None = None  # devices of the run, set in a dry run

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        parser = {"allow_abbrev": False, "exit_on_error": False}
        super().__init__(
            Agent,
            RolloutDataModule,
            parser_class=AgentParser,
            parser_kwargs={**parser, **dict.fromkeys(self.subcommands(), parser)},
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=CheckpointedTrainer,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # the agent saves its own hyperparameters
            save_config_callback=RunRecord,
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        every = LightningCLI.subcommands()
        return {name: every[name] for name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({f"trainer.{key}": value for key, value in DEFAULTS.items()})
        add = parser.add_argument
        add("--quiet", type=bool, default=False, help="Show warnings and results only.")
        add("--dry_run", type=bool, default=False, help="Build everything, show the plan and one prompt, and stop.")
        changes = "Comma-separated keys that may differ from those of the run that saved ckpt_path."
        add("--resume_with_changes", type=str, default="", help=changes)

    # Methods for keys

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; an error names the key with its file and line."""
        self.given = with_shipped_configs(args if isinstance(args, list) else sys.argv[1:])
        given = Given(self.given)
        for name, _ in options_of(self.given):
            if re.match(r"data\.(init_args\.)?envs\b.", name):  # the parser would change the last source
                what = f"--{name} does not say which of the sources it changes"
                raise ConfigError(f"{what}; change the list in the config, or give the whole list with --data.envs")
        try:
            self.config = parser.parse_object(args) if isinstance(args, dict) else parser.parse_args(self.given)
        except ArgumentError as error:
            known = (*OPTIONS, *parser.get_defaults().as_dict())
            raise ConfigError(config_problem(given.tree, known) or one_line(str(error))) from error
        self.settings = self.config.get(self.config.get("subcommand"), self.config)
        check_secrets(self.settings.as_dict())
        if self.settings is not self.config:  # Lightning would read arguments of the agent from the checkpoint
            self._ckpt_path, self.settings.ckpt_path = self.settings.ckpt_path, None
        if self.settings.get("quiet"):
            for name in ("lightning.pytorch", "lightning.fabric"):
                logging.getLogger(name).setLevel(logging.WARNING)

    def before_instantiate_classes(self) -> None:
        """Refuse settings that are not supported or would fail late."""
        if self.subcommand is not None:
            self.settings.ckpt_path = self._ckpt_path
        trainer, checkpoint = self.settings.trainer, self.settings.get("ckpt_path")
        if self.settings.get("dry_run") and self.subcommand != "fit":
            raise ConfigError("--dry-run plans a training run; use it with fit, not with another command")
        refuse_foreign_keys(trainer)
        for arguments in (callback.get("init_args") or {} for callback in _listed(trainer.callbacks)):
            for key in [key for key, value in arguments.items() if isinstance(value, Enum)]:
                arguments[key] = arguments[key].value  # Lightning's Timer has an enum default, which YAML cannot store
        limits = (trainer.max_epochs, trainer.max_steps, trainer.max_time, trainer.fast_dev_run)
        # Without a limit, Lightning would run 1000 epochs.
        if self.subcommand == "fit" and limits == (None, -1, None, False):
            what, key = "the key trainer.max_epochs is missing", "trainer.max_epochs"
            fix = "set it to the number of iterations, including those of a critic warm-up"
            raise ConfigError(Problem(what, key=key, missing=True, fix=fix))
        if checkpoint and checkpoint not in WORDS and not exists(Path(checkpoint)):
            raise ConfigError(f"there is no checkpoint '{checkpoint}' (key ckpt_path)")

    # Methods that build objects

    def instantiate_classes(self) -> None:
        """Build agent, data module and trainer; a constructor's error names its class and key."""
        refused: list[tuple[type, Exception]] = []

        def make(class_type: type, *args: Any, **kwargs: Any) -> Any:
            try:
                check_arguments(class_type, kwargs)
                return class_type(*args, **kwargs)
            except (ValueError, ImportError, MisconfigurationException) as error:
                refused.append((class_type, error))  # the parser wraps the error in a long message
                raise

        try:
            made = self.config_init = self.parser.instantiate(self.config, instantiators=[(make, object, True)])
        except Exception as error:
            if not refused:
                raise
            raise ConfigError(constructor_problem(*refused[0], self.settings.as_dict())) from error
        self.start = made if self.subcommand is None else made[self.subcommand]
        self.model, self.datamodule = self.start.model, self.start.data
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer, with callbacks for progress, reports and checkpoints unless turned off."""
        config = self.start.trainer
        callbacks = _listed(config.callbacks)
        if quiet := self.settings.get("quiet", False):
            callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
            kwargs |= {"enable_progress_bar": False, "enable_model_summary": False}
        progress = not quiet and config.enable_progress_bar is not False
        callbacks = with_defaults(callbacks, progress, config.enable_checkpointing is not False)
        self.signals = cast(Any, callbacks[0])
        self.signals.command = ["agentrl", *self.given]
        if self.settings.get("dry_run"):  # a dry run writes no files
            self.place, instead = planned_trainer(config)
            self.save_config_callback, kwargs = None, {**kwargs, **instead, "logger": False}
        try:
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException) as error:
            raise ConfigError(f"trainer: {one_line(str(error))}") from error

    def after_instantiate_classes(self) -> None:
        """Resolve ``ckpt_path`` to a checkpoint, and set the keys that a resumed run may change.

        A job that SLURM requeued continues from its own last checkpoint, even if ``ckpt_path`` names another
        checkpoint.
        """
        accepted = self.settings.get("resume_with_changes", "").split(",")
        self.model.resume_with_changes = [key.strip() for key in accepted if key.strip()]
        requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        if self.subcommand == "fit" and requeued and any(Path(self.trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")):
            # The last checkpoint may be newer than the checkpoint that Lightning saved for SLURM.
            self.start["ckpt_path"] = "last"
        if (word := self.start.get("ckpt_path")) in WORDS:
            self.start["ckpt_path"] = str(named_checkpoint(word, self.trainer))

    # Methods for the run

    def fit(self, **kwargs: Any) -> None:
        with guarded(self, "fit"):
            if self.place is None:
                self.trainer.fit(**kwargs)
                return
            plan = RunPlan(self.trainer, self.model, self.datamodule, self.place, kwargs.get("ckpt_path"))
            rank_zero_only(print)(plan.text(), flush=True)
            plan.close()

    def validate(self, **kwargs: Any) -> None:
        with guarded(self, "validate"):
            self.trainer.validate(**kwargs)

    def after_validate(self) -> None:
        """Print the results of each source on held-out episodes."""
        numbers = {name: float(number) for name, number in self.trainer.callback_metrics.items()}
        rank_zero_only(print)(held_out_table(numbers, self.datamodule.pool.names), flush=True)


def _listed(callbacks: Any) -> list[Any]:
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
