"""The command `agentrl`: help text, dispatch of subcommands, and exit codes."""

from __future__ import annotations

import inspect
import io
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_type_hints

from lightning_agentrl import __version__
from lightning_agentrl.commands.ending import one_line_errors
from lightning_agentrl.commands.files import with_game, with_shipped_configs
from lightning_agentrl.errors import ConfigError, Problem, closest
from lightning_agentrl.errors.config_errors import options_of
from lightning_agentrl.models.allocator import keep_freed_memory

HELP = """usage: agentrl COMMAND [OPTIONS]

Multi-turn reinforcement learning of language and vision-language agents.

train
  fit            train the policy
  validate       evaluate the policy on held-out seeds
  evaluate       compare policies on held-out seeds of several environments
  clone          run behavior cloning on scripted players or a recorded run
  export         write the policy of a checkpoint as a transformers folder

look
  view           open the run viewer, or compare two runs
  play           play an environment yourself, with the prompts of the model
  inspect        play episodes before training and report what could stop it

check
  check-env      check an environment before training
  verify-engine  check that the engine samples from the trained weights
  replay         rerun one iteration and compare it bit by bit
  bisect         find where two runs diverge
  audit-critic   compare a critic's values with measured returns

serve
  serve          start a vLLM server
  serve-env      start an OpenEnv server for an environment
  serve-policy   start a server of a trained policy for its agent

create
  new            write a project: config, game and test

examples
  agentrl fit --env my_module:Game-v0 --policy demo  train a model on a game, without a config
  agentrl fit --config quickstart --dry-run       show sizes, memory and one prompt, then stop
  agentrl fit --config quickstart --quiet         show warnings and results only
  agentrl fit --config quickstart --print_config  print every key with its value
  agentrl fit --model.help PPOAgent               list the keys of a class
  agentrl validate --config quickstart --ckpt_path last
  agentrl evaluate last.ckpt random --config small_games --samples 4
  agentrl view runs/quickstart
  agentrl COMMAND --help                          list the arguments of a command
  agentrl --version
"""
FLAGS = {f"--{flag}": f"--{flag.replace('-', '_')}" for flag in ("dry-run", "quiet", "train", "serve")}


def replay(run: Path, iteration: int | None = None) -> bool:
    """Rerun one iteration from the nearest earlier checkpoint and compare it bit by bit; exit with 1 if it differs.

    Args:
        run: folder of the run with config.yaml, chain and checkpoints. Of several versions, the newest is used.
        iteration: number of the iteration, from 1. Default: the last iteration.
    """
    from lightning_agentrl.tools.replay import replay_iteration

    with TemporaryDirectory() as folder:
        same, said = replay_iteration(run, iteration, Path(folder))
    print("\n".join(said))
    return same


def bisect(first: Path, second: Path, tolerance: float = 1e-5) -> str:
    """Find where two runs diverge: the first difference of any size, and the first beyond the tolerance.

    Args:
        first: folder of a run. Of several versions, the newest is used.
        second: folder of another run.
        tolerance: largest accepted difference; relative for values above 1.
    """
    from lightning_agentrl.tools.replay import bisect_runs

    return "\n".join(bisect_runs(first, second, tolerance))


def new(folder: Path) -> str:
    """Write a project: a commented config, a game, a test of the game, and a page with the next steps.

    Args:
        folder: folder to create, such as my_agent.
    """
    from lightning_agentrl.tools.new import make_project

    names, there = make_project(folder), shlex.quote(str(folder))
    return f"written to {folder}: {', '.join(names)}\nnext: cd {there} && agentrl fit --config config.yaml --dry-run"


OF_A_RUN = ("fit", "validate", "evaluate", "verify-engine", "inspect", "clone")  # commands that need a run's config
OWN = {  # commands with the arguments of a function: file and name of the function
    "new": "main:new",
    "play": "play:play_environment",
    "view": "view:view_runs",
    "export": "export:export_checkpoint",
    "replay": "main:replay",
    "audit-critic": "audit_critic:audit_run",
    "bisect": "main:bisect",
    "serve": "serve:serve_model",
    "check-env": "check_env:check_env",
    "serve-env": "serve_env:serve_env",
    "serve-policy": "serve_policy:serve_policy",
}
OPTIONS = "options"  # parameter for options of another program, which follow --
MAY_FOLLOW = {  # optional last positional argument: name and help
    "view": ("other", "folder of a second run, to compare"),
    "check-env": ("env", "id as in a config, such as agentrl_envs:GuessNumber-v0, or the URL of an OpenEnv server"),
}


def main() -> None:
    """Run the command of this process."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        # Undecodable input and unencodable output must not raise an error.
        if isinstance(stream, io.TextIOWrapper):
            with suppress(io.UnsupportedOperation):
                stream.reconfigure(errors=errors)
    with one_line_errors():
        arguments = with_flag_values(sys.argv[1:])
        if not arguments or arguments[0] in ("-h", "--help"):
            print(HELP, end="")
            return
        if arguments[0] == "--version":
            print(f"agentrl {__version__}")
            return
        sys.path.append("")  # make modules in the current folder importable
        found = _run(arguments, typed=True)
        if isinstance(found, str):
            print(found)
        if found is False:
            raise SystemExit(1)


def run(args: Sequence[str] | Mapping[str, Any] | None = None) -> Any:
    """Run a command like `agentrl`, but raise errors instead of printing messages.

    Args:
        args: command and options, such as ``["fit", "--config", "quickstart", "--dry-run"]``, or a config as a mapping,
            whose key `subcommand` is `fit` or `validate`. None: the arguments of this process.

    Returns:
        For `fit` and `validate`, the :class:`AgentCLI` with agent, data module and trainer; for other commands, a text
        or path, or whether a check has passed.
    """
    from lightning_agentrl.commands.fit import AgentCLI

    if isinstance(args, Mapping):
        return AgentCLI(dict(args))
    return _run(with_flag_values(sys.argv[1:] if args is None else args))


def with_flag_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a value behind each flag, as the parser requires; the default value is `true`."""
    return [
        FLAGS[argument] + ("" if value in ("true", "false") else "=true") if argument in FLAGS else argument
        for argument, value in pairwise([*arguments, ""])
    ]


def _run(arguments: Sequence[str], typed: bool = False) -> Any:
    """Run a command and return its result.

    Args:
        arguments: command and options, in the form that the parser expects.
        typed: whether the process runs only this command; the parser then reads ``sys.argv``.
    """
    command = arguments[0]
    if command in OWN:
        return _run_own(command, arguments[1:])
    if command not in OF_A_RUN:
        known = (*OF_A_RUN, *OWN)
        if command.startswith("-"):
            raise ConfigError(Problem("the command is missing", suggestion=f"agentrl fit {command} ..."))
        what = f"there is no command '{command}'"
        raise ConfigError(Problem(what, known=known, suggestion=closest(command, known)))
    arguments = with_shipped_configs(with_game(arguments))
    from lightning_agentrl.commands.ending import end_quietly, leave_out_noise
    from lightning_agentrl.commands.fit import AgentCLI

    if typed:
        sys.argv[1:] = arguments
        keep_freed_memory()
        leave_out_noise()
        end_quietly()
    if command in ("fit", "validate"):
        return AgentCLI(None if typed else arguments)
    return import_module(f"lightning_agentrl.commands.{command.replace('-', '_')}").run(arguments[1:])


def _run_own(command: str, arguments: Sequence[str]) -> Any:
    """Run a command that is a function: parse its arguments, call it, and return its result."""
    from jsonargparse import ArgumentError, ArgumentParser

    module, _, name = OWN[command].partition(":")
    function = getattr(import_module(f"lightning_agentrl.commands.{module}"), name)
    follows, about = MAY_FOLLOW.get(command, ("", ""))
    own, options = list(arguments), dict[str, Any]()
    names = list(inspect.signature(function).parameters)
    if OPTIONS in names and "--" in own:
        at = own.index("--")
        own, options = own[:at], {OPTIONS: own[at + 1 :]}
    for name, _ in options_of(own):
        if name.split(".")[0] not in (*names, "help"):
            meant = closest(name, names)
            raise ConfigError(Problem(f"there is no option '--{name}'", suggestion=f"--{meant}" if meant else ""))
    parser = ArgumentParser(
        prog=f"agentrl {command}",
        description=function.__doc__ and function.__doc__.splitlines()[0],
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_function_arguments(function, as_positional=True, skip={OPTIONS, follows})
    if follows:
        parser.add_argument(follows, nargs="?", type=get_type_hints(function)[follows], default=None, help=about)
    try:
        settings = parser.parse_args(own).as_dict()
    except ArgumentError as error:
        raise ConfigError(f"{str(error).splitlines()[0]}; see agentrl {command} --help") from error
    try:
        return function(**settings, **options)
    except ConfigError:  # the error already names its key
        raise
    except OSError as error:
        what = f"'{error.filename}' cannot be used: {error.strerror}" if error.filename else str(error)
        raise ConfigError(what) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
