"""Base class of the commands that read a run's config for something other than training."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.commands.places import options


class RunConfigCLI(AgentCLI):
    """A command that does something else with the config of a run, or of a validation, than to repeat it."""

    def __init__(self, args: ArgsType = None) -> None:
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")  # callbacks of a run write
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
        """Parse the given arguments. A config names the checkpoint that its run went on from, which is not taken."""
        super().parse_arguments(parser, args)
        if "ckpt_path" not in dict(options(self.given)):
            self.config.ckpt_path = None
