"""What commands share that play with the policy of a run's config, on one device, and train nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser

from lightning_agentrl.agents import Agent
from lightning_agentrl.commands.places import options
from lightning_agentrl.commands.room_to_write import make_room_for
from lightning_agentrl.commands.run_config import RunConfigCLI
from lightning_agentrl.commands.written_over import PAGE
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.rollout import RolloutDataModule

Found = TypeVar("Found")


class Looked(Exception):
    """The end of a look, raised once everything was played so that nothing else is done."""


class LookOnce(L.Callback, Generic[Found]):
    """Something that is done with a connected agent when a validation begins, which is then ended.

    Args:
        what: takes the agent and returns what was found.
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
    """Connect an agent by a validation, whose callback :class:`LookOnce` ends it."""
    try:
        trainer.validate(agent, data, ckpt_path=ckpt_path, verbose=False)
    except Looked:
        data.teardown("validate")


class LookCLI(RunConfigCLI):
    """A command that builds models and engine of a run's config, plays with them, writes a file and trains nothing."""

    prog: ClassVar[str]
    episodes: ClassVar[int]  # that are played when nothing else is said
    episodes_help: ClassVar[str] = "Episodes to play."
    file: ClassVar[str]  # below the run's root when not given
    file_help: ClassVar[str] = "File of the page"
    begins: ClassVar[bytes] = PAGE  # the file

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(prog=self.prog, **kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--episodes", type=int, default=self.episodes, help=self.episodes_help)
        parser.add_argument(
            "--out",
            type=str | None,
            default=None,
            help=f"{self.file_help}. Default: {self.file} in trainer.default_root_dir.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the given arguments, and play on one device whatever the config says."""
        super().parse_arguments(parser, args)
        config = self.config
        devices, nodes = config.trainer.devices, config.trainer.num_nodes
        self.processes = devices * nodes if isinstance(devices, int) and devices > 0 else nodes  # of the run
        config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy = 1, 1, "auto"
        config.trainer.limit_val_batches = None  # else the config may leave out what is played
        self.check_file("out", self.begins)

    def check_file(self, argument: str, begins: bytes) -> None:
        """Refuse a file that cannot be written, that is read, or that begins otherwise than what is written there.

        Raises:
            ConfigError: with the argument to change.
        """
        given = self.config[argument]
        if given is None:
            return
        configs = {Path(value).resolve() for name, value in options(self.given) if name in ("c", "config")}
        if Path(given).resolve() in configs:
            raise ConfigError(
                f"'{given}' is the config that is read; name another file to write (argument --{argument})"
            )
        make_room_for(Path(given), begins, argument)

    def look(self, what: Callable[[Agent], Found]) -> Found | None:
        """Return what is found with the connected agent; None: a signal ended it."""
        trainer = cast(Any, self.trainer)
        make_room_for(self.out, self.begins, "out")  # also where no name was given
        callback = LookOnce(what)
        bars = [each for each in trainer.callbacks if isinstance(each, ProgressBar)]
        trainer.callbacks, trainer.loggers = [*bars, callback], []
        self._guarded(
            "validate", lambda: validate_until_looked(trainer, self.model, self.datamodule, self.start.ckpt_path)
        )
        return callback.found

    @property
    def policy(self) -> str:
        """What was played, in words."""
        return self.start.ckpt_path or f"{self.model.model}, untrained"

    @property
    def out(self) -> Path:
        """The file to write."""
        return Path(self.settings.out or Path(cast(Any, self.trainer).default_root_dir) / self.file)
