"""`agentrl fit` and `agentrl validate`: LightningCLI with the defaults, checks and errors that suit agents."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, cast

import lightning as L
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only

import lightning_agentrl.advantages
import lightning_agentrl.callbacks
import lightning_agentrl.engines
import lightning_agentrl.losses
import lightning_agentrl.models.critic  # noqa: F401
from lightning_agentrl.agents import Agent
from lightning_agentrl.agents.checkpoint import CheckpointedTrainer, exists, last_good_checkpoint
from lightning_agentrl.agents.checks import check_keys, refuse_foreign_keys
from lightning_agentrl.agents.sharding import check_strategy
from lightning_agentrl.callbacks import StopOnSignals
from lightning_agentrl.callbacks.run_checkpoints import WORDS, named_checkpoint
from lightning_agentrl.callbacks.run_folder import RunRecord
from lightning_agentrl.callbacks.trainer import CALLBACKS, DEFAULTS, with_defaults
from lightning_agentrl.commands.check_files import check_file
from lightning_agentrl.commands.constructors import ConstructorError, construct, constructor_error, naming_its_class
from lightning_agentrl.commands.empty_keys import empty_keys
from lightning_agentrl.commands.ending import lost_reader
from lightning_agentrl.commands.failures import explained, lost_process
from lightning_agentrl.commands.held_out_table import held_out_table
from lightning_agentrl.commands.places import options, places_of
from lightning_agentrl.commands.plan import DryRun, PlanShown
from lightning_agentrl.commands.room_to_write import make_folder
from lightning_agentrl.commands.shipped import with_shipped_configs
from lightning_agentrl.episodes.sources import ENVS
from lightning_agentrl.errors import CheckpointError, ConfigError, Problem, explain, one_line
from lightning_agentrl.errors.foreign_messages import OPTIONS, trainer_problem
from lightning_agentrl.errors.names import asked_by_others, import_class, raised_by_us
from lightning_agentrl.errors.problem import COMMAND_LINE, Place
from lightning_agentrl.errors.secrets import check_secrets
from lightning_agentrl.errors.unknown import nameless, unknown_argument
from lightning_agentrl.rollout import RolloutDataModule
from lightning_agentrl.rollout.stopping import Stopped

# Lightning's Timer has one as the default of a text, with which no config could be written.
yaml.SafeDumper.add_multi_representer(Enum, lambda dumper, x: dumper.represent_data(x.value))

_NOT_SHOWN = ("help", "weights_only", "verbose")  # options that no answer to a misspelt one lists


class AgentParser(LightningArgumentParser):
    """A parser with errors in one sentence and without abbreviated options."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.makers: list[tuple[Callable[..., Any], type, bool]] = []  # of model and data, which keep their arguments

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # an inner parser, whose error becomes part of a longer one
            super().error(message, ex)
        raise ConfigError(explain(message, ex)) from ex

    def parse_args(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        """Parse options; an inner parser is given a value of a class's key as Python writes it, and reads YAML."""
        if not self.exit_on_error and args is not None:
            args = [re.sub(r"^(--[^=]+=)None$", r"\1null", argument) for argument in args]
        return super().parse_args(args, *rest, **kwargs)

    def add_instantiator(self, instantiator: Callable[..., Any], class_type: type, subclasses: bool = True) -> None:
        self.makers.append((naming_its_class(instantiator), class_type, subclasses))

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Make the objects of a config; an error of a constructor names its class."""
        if self.makers:  # those of the command's parser also apply to the parsers in it
            kwargs["instantiators"] = [*self.makers, (naming_its_class(construct), object, True)]
        return super().instantiate(*args, **kwargs)


class AgentCLI(LightningCLI):
    """Model and data by class_path, defaults that suit agents, errors in one sentence."""

    model: Agent
    datamodule: RolloutDataModule
    config: Any

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        super().__init__(
            Agent,
            RolloutDataModule,
            parser_class=AgentParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_class=CheckpointedTrainer,
            auto_configure_optimizers=False,
            save_config_callback=RunRecord,
            args=args,
            run=run,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        every = {"model", "datamodule"}
        return {"fit": every | {"train_dataloaders", "val_dataloaders"}, "validate": every | {"dataloaders"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.set_defaults({f"trainer.{key}": value for key, value in DEFAULTS.items()})
        parser.add_argument("--quiet", type=bool, default=False, help="Show warnings and results only.")
        parser.add_argument(
            "--dry_run", type=bool, default=False, help="Build everything, show the plan and one prompt, and stop."
        )
        parser.add_argument(
            "--resume_with_changes",
            type=str,
            default="",
            help="Keys, with commas between them, that may differ from those of the run that saved ckpt_path.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Check the config files first, since the parser does not say which of them is wrong."""
        self.given = given = with_shipped_configs(args if isinstance(args, list) else sys.argv[1:])
        args = given if isinstance(args, list) else args
        for name, value in options(given):
            if name in ("c", "config") and Path(value).is_file():
                check_file(Path(value))
        if args is None or isinstance(args, list):
            self._refuse_unknown_option(parser, given)
        _refuse_override_of_one(given)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().parse_arguments(parser, args)
        parsed = self.config
        settings = parsed.get(parsed.get("subcommand"), parsed)
        if "trainer" in settings and settings.trainer is None:
            raise ConfigError(Problem("trainer has no keys; give it some, or leave it out", key="trainer"))
        check_secrets(settings.as_dict())
        for key, default in empty_keys(settings.as_dict()):
            left = "" if default is inspect.Parameter.empty else f", or leave the key out (it is {default!r} then)"
            raise ConfigError(Problem(f"{key.rpartition('.')[2]} has no value; write one{left}", key=key))
        seed = settings.get("seed_everything")
        if type(seed) is int and not 0 <= seed < 2**32:
            what = f"seed_everything cannot be used: it must be from 0 to {2**32 - 1}, got {seed}"
            raise ConfigError(Problem(what, key="seed_everything"))
        if settings.get("quiet"):
            for name in ("lightning.pytorch", "lightning.fabric"):
                logging.getLogger(name).setLevel(logging.WARNING)

    def _refuse_unknown_option(self, parser: LightningArgumentParser, given: Sequence[str]) -> None:
        """Refuse a misspelt option; of --config, the parser would tell that all is missing."""
        own = getattr(self, "_subcommand_parsers", {}).get(given[0], parser) if given else parser
        names = [string[2:] for string in own._option_string_actions if string.startswith("--") and "." not in string]
        known = [name for name in dict.fromkeys((*OPTIONS, *names)) if name not in _NOT_SHOWN]
        for argument in given:
            head = re.match(r"--([^.=+]+)", argument)
            if head and head[1] not in (*known, *_NOT_SHOWN):
                raise ConfigError(unknown_argument(argument, known))

    def _parse_ckpt_path(self) -> None:
        """Take the agent's arguments from the config alone; Lightning would read a checkpoint here to look for some."""

    def _dump_config(self) -> None:
        """Keep the keys as plain data, for modules that save what they were made with.

        Lightning would check what was checked as it was parsed, and read YAML, which takes a sixth of a start.
        """
        if not hasattr(self, "config_dump"):
            plain = {"skip_link_targets": False, "skip_unset": False, "skip_validation": True, "format": "json"}
            dump = json.loads(self.parser.dump(self.config, **plain))
            self.config_dump = dump if self.subcommand is None else dump[self.subcommand]

    @property
    def settings(self) -> Any:
        """The parsed keys; those of the subcommand if there is one."""
        return self.config if self.subcommand is None else self.config[self.subcommand]

    @property
    def start(self) -> Any:
        """What the subcommand begins with: objects in place of the keys, and the checkpoint."""
        return self.config_init if self.subcommand is None else self.config_init[self.subcommand]

    def before_instantiate_classes(self) -> None:
        """Refuse settings that conflict with ours or would fail late."""
        if self.settings.get("dry_run") and self.subcommand != "fit":
            other = self.subcommand or "another command"
            raise ConfigError(f"a dry run shows the plan of a training run; give --dry-run to fit, not to {other}")
        refuse_foreign_keys(self.settings.trainer)
        _refuse_nameless(self.settings.trainer.get("callbacks"))
        if self.settings.trainer.get("default_root_dir") == "":  # which would be the working folder
            what, key = "trainer.default_root_dir is empty; name a folder", "trainer.default_root_dir"
            raise ConfigError(Problem(what, key=key))
        make_folder(
            self.settings.trainer.get("default_root_dir"),
            "trainer.default_root_dir",
            keep=not self.settings.get("dry_run"),
        )
        if self.subcommand == "fit":
            _refuse_no_end(self.settings.trainer)
        checkpoint = self.settings.get("ckpt_path")
        if checkpoint == "":
            raise ConfigError("ckpt_path is empty; name a checkpoint, last or best, or leave it out (key ckpt_path)")
        if checkpoint and checkpoint not in WORDS and not exists(Path(checkpoint)):
            raise ConfigError(f"there is no checkpoint '{checkpoint}' (key ckpt_path)")

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ConstructorError as error:
            raise constructor_error(error, self.settings.as_dict()) from error.__cause__

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Add progress, a report of rollouts and checkpoints where the config has none; heed quiet runs."""
        config = self._get(self.config_init, "trainer", default={})
        callbacks = (
            list(config["callbacks"] or []) if isinstance(config["callbacks"], list | None) else [config["callbacks"]]
        )
        quiet = self.settings.get("quiet", False)
        if quiet:
            callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
            kwargs |= {"enable_progress_bar": False, "enable_model_summary": False}
        progress = not quiet and config["enable_progress_bar"] is not False
        callbacks = with_defaults(callbacks, progress, config["enable_checkpointing"] is not False)
        _refuse_twice(callbacks)
        self.signals = cast(StopOnSignals, callbacks[0])
        self.signals.command = ["agentrl", *self.given]
        try:
            trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as error:
            raise ConfigError(trainer_problem(error, self.settings.trainer)) from error
        if self.settings.get("dry_run"):
            # it writes before training starts
            kept = [callback for callback in cast(Any, trainer).callbacks if not isinstance(callback, RunRecord)]
            cast(Any, trainer).callbacks = [DryRun(), *kept]
            trainer.loggers = []
        return trainer

    def after_instantiate_classes(self) -> None:
        """Refuse strategies and keys before processes start, since some would fail there with messages of their own;
        find the checkpoint that ``ckpt_path`` means.

        A job that SLURM starts again goes on with what it saved for that, whatever its first start went on from.
        """
        accepted = self.settings.get("resume_with_changes", "").split(",")
        self.model.resume_with_changes = [key.strip() for key in accepted if key.strip()]
        requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        if self.subcommand == "fit" and requeued and any(Path(self.trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")):
            self.start["ckpt_path"] = "last"  # it may have saved another one since, before its machine failed
        if (word := self.start.get("ckpt_path")) in WORDS:
            self.start["ckpt_path"] = str(named_checkpoint(word, self.trainer))
        try:
            check_strategy(self.trainer, self.model.lora is not None)
            if self.subcommand == "fit":
                check_keys(self.trainer)  # some callbacks raise in their own setup, which comes first
        except ValueError as error:
            raise ConfigError(one_line(str(error))) from error

    def after_validate(self) -> None:
        """Print the held-out episodes of each source."""
        numbers = {name: float(number) for name, number in self.trainer.callback_metrics.items()}
        names = self.datamodule.pool.names
        rank_zero_only(print)(held_out_table(numbers, names), flush=True)

    def _run_subcommand(self, subcommand: str) -> None:
        run = super()._run_subcommand
        self._guarded(subcommand, lambda: run(subcommand))

    def _guarded(self, stage: str, run: Callable[[], object]) -> None:
        """Run, and after an error stop engine and environments, so that no thread is left.

        Raises:
            ConfigError: an error that a user can fix; before the first rollout every ValueError of ours is one.
        """
        data = self.datamodule
        try:
            run()
        except BaseException as error:
            playing = bool(data.sessions)
            interrupted = isinstance(error.__context__, KeyboardInterrupt)  # Lightning has shut down and exits with 1
            with _ending(error, self.signals.ends_at) if interrupted or isinstance(error, Stopped) else nullcontext():
                data.teardown(stage)  # a thread inside torch would abort the process as it exits
            if isinstance(error, PlanShown):
                return
            trains = self.subcommand == "fit"  # other commands have nothing to continue
            if interrupted:
                raise KeyboardInterrupt(_stopped(self.trainer, playing) if trains else "") from None
            if trains and lost_reader(error):
                error.add_note(_stopped(self.trainer, playing))
                raise
            config_error = self._config_error(error, playing)
            told = "ckpt_path" in str(config_error or error)
            if trains and playing and isinstance(error, Exception) and not told and last_good_checkpoint(self.trainer):
                error.add_note(_stopped(self.trainer, playing))
            if config_error:
                raise config_error from error
            raise

    def _config_error(self, error: BaseException, playing: bool) -> ConfigError | None:
        """Return the sentence of an error that a user can fix; None for others, and for one that has a sentence."""
        agent, path = self.model, cast(Any, self.trainer).ckpt_path or self.start.get("ckpt_path")
        if isinstance(error, ConfigError):
            return None
        if isinstance(error, CheckpointError):
            return ConfigError(Problem(f"the checkpoint '{path}' {error.reason}", key="ckpt_path", fix=error.fix))
        if problem := lost_process(error, bool(last_good_checkpoint(self.trainer))):
            return ConfigError(problem)
        if config_error := explained(error, agent.clock.failed_in or ("" if playing else "load")):
            return config_error
        if isinstance(error, MisconfigurationException) and not asked_by_others(error):
            return ConfigError(trainer_problem(error, self.settings.trainer))
        if isinstance(error, ValueError | ImportError) and not playing and raised_by_us(error):
            return ConfigError(one_line(str(error)))
        return None


def _refuse_twice(callbacks: Sequence[L.Callback]) -> None:
    """Refuse two callbacks that take the same signals."""
    if (count := sum(isinstance(callback, StopOnSignals) for callback in callbacks)) > 1:
        raise ConfigError(f"trainer.callbacks has {count} StopOnSignals; keep one of them")


def _refuse_nameless(callbacks: Any) -> None:
    """Refuse a callback that is given by its keys alone, which the parser takes for Lightning's empty one."""
    for one in callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []:
        if import_class(one["class_path"]) is L.Callback:
            given = one.get("init_args")
            raise ConfigError(nameless(next(iter(given.as_dict()), "") if given else "", CALLBACKS, L.Callback))


def _refuse_no_end(trainer: Any) -> None:
    """Refuse a run without an end, for which Lightning would take 1000 epochs."""
    ends = ("max_epochs", "max_steps", "max_time", "fast_dev_run")
    if all(trainer.get(key) in (None, -1, False) for key in ends) and trainer.get("max_epochs") is None:
        raise ConfigError(
            Problem(
                "the key trainer.max_epochs is missing",
                key="trainer.max_epochs",
                missing=True,
                fix="it is the number of iterations, those of a critic warm-up included",
            )
        )


def _refuse_override_of_one(args: Sequence[str]) -> None:
    """Refuse an option for one of several sources, since it does not say which and the parser would take the last."""
    for name, _ in options(args):
        key = ".".join(part for part in name.split(".") if part != "init_args")
        if re.match(r"data\.envs[.\[]", key):
            what = f"--{name} would change one of several sources and does not say which"
            fix = f"change the list in the config, or give a whole one with --{ENVS}"
        elif key.startswith("data.env.") and (there := places_of(Problem("", key=ENVS), args)):
            what = f"--{name} is about one environment, and the config has a list of sources at {ENVS}"
            fix = f"change the list ({there[0].where})"
        else:
            continue
        raise ConfigError(Problem(what, place=Place(COMMAND_LINE, f"--{name}"), fix=fix))


@contextmanager
def _ending(error: BaseException, ends_at: float | None) -> Iterator[None]:
    """End the process at the second Ctrl-C, and when its time is over, since teardown waits for running replies."""
    seconds = math.inf if ends_at is None else max(ends_at - time.monotonic(), 0.0)
    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), os._exit, [getattr(error, "code", 130)])
    timer.daemon = True
    timer.start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        timer.cancel()


def _stopped(trainer: L.Trainer, playing: bool) -> str:
    path = last_good_checkpoint(trainer)
    then = f"continue with --ckpt_path {path}" if path else "there is no checkpoint yet"
    # Until the run plays, Lightning's counts are not those of the checkpoint that it goes on from.
    return f"stopped {f'after iteration {trainer.current_epoch}' if playing else 'before its first rollout'}; {then}"


def run(args: ArgsType = None) -> AgentCLI:
    """Parse the arguments and run; for use from Python, where errors are raised as they are."""
    return AgentCLI(args)
