"""The `agentrl` command: LightningCLI for fit and validate."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

import lightning_agentrl.advantages  # noqa: F401 - imported so that YAML can use short class names
import lightning_agentrl.callbacks
import lightning_agentrl.engines
import lightning_agentrl.losses
import lightning_agentrl.models.critic  # noqa: F401
from lightning_agentrl.agents import Agent
from lightning_agentrl.errors import one_line_errors
from lightning_agentrl.models.allocator import keep_freed_memory
from lightning_agentrl.rollout import RolloutDataModule


class AgentCLI(LightningCLI):
    """Model and data by class_path, defaults that suit agents."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        every = {"model", "datamodule"}
        return {"fit": every | {"train_dataloaders", "val_dataloaders"}, "validate": every | {"dataloaders"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({"trainer.num_sanity_val_steps": 0})

    def instantiate_classes(self) -> None:
        _refuse_foreign_knobs(self.config[str(self.subcommand)].trainer)
        super().instantiate_classes()


def _refuse_foreign_knobs(trainer: Any) -> None:
    """The Trainer's clipping and accumulation would work beside ours; say which keys do it here."""
    if trainer.get("gradient_clip_val") is not None or trainer.get("gradient_clip_algorithm") is not None:
        raise ValueError(
            "trainer.gradient_clip_val cannot be used: gradients are clipped per parameter group; remove it and set "
            "model.init_args.max_grad_norm_actor and max_grad_norm_critic"
        )
    if trainer.get("accumulate_grad_batches") not in (None, 1):
        raise ValueError(
            "trainer.accumulate_grad_batches cannot be used: a mini-batch is cut into micro-batches by itself; remove "
            "it and set data.init_args.mini_batch_turns (turns per optimizer step) and "
            "model.init_args.max_tokens_per_micro_batch (memory)"
        )


def run(args: ArgsType = None) -> AgentCLI:
    """Parse the arguments and run; for use from Python, without any handling of errors."""
    return AgentCLI(
        Agent,
        RolloutDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_kwargs={"overwrite": True},
        args=args,
    )


def main() -> None:
    """Entry point of the `agentrl` command."""
    keep_freed_memory()
    with one_line_errors():
        run(sys.argv[1:] or ["--help"])
