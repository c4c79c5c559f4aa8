"""The command `agentrl clone`: behavior cloning of the model of a run's config."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_agentrl.agents import CloneAgent
from lightning_agentrl.agents.clone import FALLING, LR
from lightning_agentrl.callbacks import PolicyFolder, RunSummary
from lightning_agentrl.commands.files import make_folder
from lightning_agentrl.commands.guarded import guarded
from lightning_agentrl.commands.run_config import RunConfigCLI
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import Expert, Recorded
from lightning_agentrl.rollout.demonstrations import EPISODES


class CloneCLI(RunConfigCLI):
    """Run behavior cloning on scripted players or a recorded run, with environments, prompts and model of a config.

    The config's agent provides the model, adapters, weight decay, gradient clip, memory settings and temperature.
    """

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog="agentrl clone", **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        add = parser.add_argument
        add("--out", type=str | None, default=None, help="Output folder of the model; it must be empty or not exist.")
        add(
            "--recorded",
            type=str | None,
            default=None,
            help="Folder of a run with a turn log to clone. Default: the environments' scripted players.",
        )
        add("--episodes", type=int | None, help=f"Episodes that the scripted players play (default: {EPISODES}).")
        add("--min_return", type=float | None, default=None, help="Leave out episodes with a lower return.")
        add(
            "--steps",
            type=int,
            default=100,
            help="Optimizer steps, each of data.init_args.mini_batch_turns turns; rounded up to whole iterations.",
        )
        add("--lr", type=float, default=LR, help="Learning rate; it decays linearly to 0.")
        add(
            "--action_share",
            type=float,
            default=0.5,
            help="Share of the loss weight on the action tokens of a reply with a thought.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse and check the given arguments; the output folder becomes the run folder."""
        super().parse_arguments(parser, args)
        config = self.config
        if config.ckpt_path is not None:
            raise ConfigError(
                "behavior cloning cannot start from a checkpoint; export it with `agentrl export`, and set "
                "model.init_args.model to the exported folder (argument --ckpt_path)"
            )
        if config.out is None:
            raise ConfigError("the output folder of the model is missing (argument --out)")
        out = Path(config.out)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"'{out}' exists and is not an empty folder; name another one (argument --out)")
        if config.recorded is not None and config.episodes is not None:
            raise ConfigError(
                "--episodes is for scripted players and --recorded for the episodes of a run; give only one of them"
            )
        make_folder(out, "--out")
        config.trainer.default_root_dir = str(out)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Train for the number of steps given by `--steps`, and ignore the limits in the config."""
        iterations = math.ceil(self.settings.steps / self.datamodule.steps_per_iteration)
        return super().instantiate_trainer(max_epochs=iterations, max_steps=-1, **kwargs)

    def clone(self) -> None:
        """Train, evaluate on held-out episodes before and after training, and write the model."""
        settings, trainer = self.settings, cast(Any, self.trainer)
        data, agent = self.datamodule, self.model
        run = settings.recorded
        bars = [each for each in trainer.callbacks if isinstance(each, ProgressBar)]
        trainer.callbacks, trainer.loggers = [*bars, PolicyFolder(settings.out), RunSummary()], []
        data.validation = replace(data.validation, every=0)  # RunSummary evaluates before and after training
        with guarded(self, "fit"):
            self.model = CloneAgent(
                agent.model,
                Expert(EPISODES if settings.episodes is None else settings.episodes) if run is None else Recorded(run),
                settings.min_return,
                settings.action_share,
                agent.lora,
                agent.train_tower,
                replace(agent.optim, lr_actor=settings.lr, schedule=FALLING),
                agent.compute,
                agent.temperature,
            )
            trainer.fit(self.model, data)


def run(args: ArgsType) -> None:
    """Run the command: behavior cloning of the config's model."""
    CloneCLI(args).clone()
