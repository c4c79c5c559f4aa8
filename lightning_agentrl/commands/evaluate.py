"""The command `agentrl evaluate`: compare policies on the same held-out seeds of several environments."""

from __future__ import annotations

from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_agentrl.commands.files import make_folder
from lightning_agentrl.commands.run_config import DataOnlyCLI
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.tools.evaluate import evaluate

# A suite has no agent and no seed. The parser requires an agent, but the agent is not used.
DEFAULTS = ["--model=PPOAgent", "--model.init_args.model=demo", "--seed_everything=false", "--quiet=true"]


class EvaluateCLI(DataOnlyCLI):
    """Evaluate policies on the environments of a suite: checkpoints, exported folders, hub ids, demo, random, scripted.

    A suite is a config of which only the section `data` is used.
    """

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog="agentrl evaluate POLICY...", **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        add = parser.add_argument
        add("--samples", type=int, default=1, help="Episodes per held-out seed.")
        add("--k", type=int | None, default=None, help="k of pass@k, at most --samples. Default: --samples.")
        where = "Folder for evaluation.json and evaluation.html, the page with the episodes."
        add("--out", type=str, default="evaluation", help=where)


def run(args: list[str]) -> None:
    """Run the command: evaluate the policies named by the first arguments, print a table, and write JSON and page."""
    policies = list(takewhile(lambda argument: not argument.startswith("-"), args))
    options: ArgsType = [*DEFAULTS, *args[len(policies) :]]
    cli = EvaluateCLI(options)
    if not policies:
        raise ConfigError("name at least one policy, such as a checkpoint, an exported folder, demo or random")
    make_folder(cli.settings.out, "--out")
    report = partial(print, flush=True)
    found = evaluate(policies, cli.datamodule, cli.settings.samples, cli.settings.k, report)
    page = found.write(Path(cli.settings.out), cli.parser.dump(cli.config, skip_unset=False))
    print(f"\n{found.table()}\n\nwritten to {page}")
