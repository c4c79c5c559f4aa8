"""Base classes of commands that use a run's config for something other than training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import lightning as L
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_agentrl.agents import Agent
from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.errors.config_errors import options_of
from lightning_agentrl.rollout import RolloutDataModule

Found = TypeVar("Found")


class RunConfigCLI(AgentCLI):
    """Base class of commands that read a run's config."""

    def __init__(self, args: ArgsType = None) -> None:
        # The warning is about a run's callbacks.
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
        super().__init__(args, run=False)

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        description, *_ = (type(self).__doc__ or "").splitlines() or [""]
        return super().init_parser(description=description, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        for key in ("weights_only", "verbose"):
            parser.add_argument(f"--{key}", type=Any, default=None, help="Unused; a run's config has it.")
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="Checkpoint of the policy, on the command line only. Default: the untrained policy.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the given arguments. Ignore the config file's checkpoint, from which the run itself continued."""
        super().parse_arguments(parser, args)
        if "ckpt_path" not in dict(options_of(self.given)):
            self.config.ckpt_path = None


class DataOnlyCLI(RunConfigCLI):
    """Base class of commands that use the environments and prompts of a config, but not its trainer."""

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Return an unused trainer, since the config's trainer may require devices that this machine lacks."""
        bare: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        return L.Trainer(**bare, enable_progress_bar=False, enable_model_summary=False)


class Looked(Exception):
    """Raised to end a validation once :class:`LookOnce` has its result."""


class LookOnce(L.Callback, Generic[Found]):
    """Call a function with the connected agent when a validation begins, and end the validation.

    Args:
        what: function that takes the agent; its result is stored in ``found``.
    """

    def __init__(self, what: Callable[[Agent], Found]) -> None:
        self.what = what
        self.found: Found | None = None

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found = self.what(cast(Agent, pl_module))
        raise Looked


def validate_until_looked(
    trainer: L.Trainer, agent: Agent, data: RolloutDataModule, ckpt_path: str | None = None
) -> None:
    """Start a validation, which connects the agent, and stop when the callback :class:`LookOnce` ends it."""
    try:
        trainer.validate(agent, data, ckpt_path=ckpt_path, verbose=False)
    except Looked:
        data.teardown("validate")
