"""The command `agentrl`: its subcommands, and what happens around each of them."""

from __future__ import annotations

import inspect
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from lightning_agentrl import __version__
from lightning_agentrl.commands.check_files import check_files
from lightning_agentrl.commands.ending import one_line_errors
from lightning_agentrl.commands.failures import file_fault
from lightning_agentrl.commands.places import SUBCOMMANDS
from lightning_agentrl.commands.shipped import with_shipped_configs
from lightning_agentrl.errors import ConfigError, Usage, explain, unknown_command
from lightning_agentrl.errors.unknown import empty_argument
from lightning_agentrl.models.allocator import keep_freed_memory

HELP = """usage: agentrl COMMAND [OPTIONS]

Multi-turn reinforcement learning of language agents.

commands
  new            begin            agentrl new my_agent
  fit            train            agentrl fit --config quickstart
  validate       judge            agentrl validate --config quickstart --ckpt_path last
  inspect        before training  agentrl inspect --config quickstart
  clone          learn by example agentrl clone --config quickstart --out cloned
  play           play yourself    agentrl play agentrl_envs:GuessNumber-v0
  view           look at a run    agentrl view runs/quickstart
                 or compare two   agentrl view runs/one runs/other
  export         write a model    agentrl export runs/quickstart/.../last.ckpt my_model
  replay         run it again     agentrl replay runs/quickstart --iteration 7
  audit-critic   judge a critic   agentrl audit-critic runs/quickstart
  bisect         compare runs     agentrl bisect runs/one runs/other
  verify-engine  check sampling   agentrl verify-engine --config quickstart_vllm
  serve          start vLLM       agentrl serve demo --port 8001
  check-env      check a game     agentrl check-env agentrl_envs:GuessNumber-v0
  serve-env      offer a game     agentrl serve-env agentrl_envs:Bandit-v0 --port 8000

  agentrl COMMAND --help      what a command takes
  agentrl fit --model.help PPOAgent   the keys of a class; --data.help, --data.init_args.env.help
  agentrl fit --print_config  a config with every key and its default
  agentrl fit --dry-run       build everything, show the plan and one prompt, and stop
  agentrl fit --quiet         warnings and results only
  agentrl --version
"""
FLAGS = {
    "--dry-run": "--dry_run=true",
    "--quiet": "--quiet=true",
    "--train": "--train=true",
    "--serve": "--serve=true",
}  # flags as the parser takes them


def view(
    run: str,
    other: str | None = None,
    out: str | None = None,
    last: int | None = None,
    serve: bool = False,
    port: int | None = None,
) -> None:
    """Write one self-contained page of a run, or of two beside each other; lists the runs of a folder with several.

    Args:
        run: folder of the run, which must have had the callback TurnLog, or a folder of runs to list.
        other: folder of a second run, to compare.
        out: file of the page; view.html in the folder of the run when not given, compare.html for two.
        last: show only this many of the last iterations, for large logs.
        serve: offer the page to browsers of this machine, and show what is new while the run trains.
        port: where to offer it, 8002 when not given, 0 for any that is free; browsers keep stars and notes by it.
    """
    from lightning_agentrl.commands.view import view_runs

    view_runs(Path(run), None if other is None else Path(other), None if out is None else Path(out), last, serve, port)


def replay(run: str, iteration: int | None = None) -> None:
    """Run an iteration of a run once more, from the nearest checkpoint before it, and say whether it is the same.

    Args:
        run: folder of the run, with its config.yaml, chain and checkpoints; of several versions the newest is taken.
        iteration: its number, from 1; the last one when not given. Exits with 1 if any bit differs.
    """
    from lightning_agentrl.tools.replay import replay_iteration

    with TemporaryDirectory() as folder:
        same, said = replay_iteration(Path(run), iteration, Path(folder))
    print("\n".join(said))
    if not same:
        raise SystemExit(1)


def audit_critic(
    run: str, checkpoint: str | None = None, branches: int = 4, every: int = 1, out: str | None = None
) -> None:
    """Compare the values of a run's critic, and the advantages of estimators, with values measured by playing on.

    Args:
        run: folder of the run, with its config.yaml and checkpoints; of several versions the newest is taken. Nothing
            in it changes but the page.
        checkpoint: of the run; the newest one when not given. The rollout after it is played, and nothing is trained.
        branches: episodes that are played on from each state.
        every: states of the turns whose number is a multiple of this are valued, and the first one of each episode.
        out: file of the page; audit.html in the folder of the run when not given.
    """
    from lightning_agentrl.commands.audit_critic import audit_run
    from lightning_agentrl.commands.quiet import leave_out_noise

    leave_out_noise()
    print(audit_run(Path(run), checkpoint, branches, every, None if out is None else Path(out)))


def bisect(first: str, second: str, tolerance: float = 1e-5) -> None:
    """Say where two runs part: the first difference at all, and the first beyond a tolerance.

    Args:
        first: folder of a run; of several versions the newest is taken.
        second: folder of another run.
        tolerance: gap of two numbers that is not beyond it, relative above 1.
    """
    from lightning_agentrl.tools.replay import bisect_runs

    print("\n".join(bisect_runs(Path(first), Path(second), tolerance)))


def export(checkpoint: str, folder: str, merge: bool | None = None, model: str | None = None) -> None:
    """Write the policy of a checkpoint as a transformers folder.

    Args:
        checkpoint: a checkpoint of `agentrl fit`.
        folder: where to write; must be empty or not exist.
        merge: whether adapters are merged into the model (default) or written alone.
        model: hub id or folder of the model that the run started from, if it is not where the run found it.
    """
    from lightning_agentrl.commands.export import export_checkpoint

    export_checkpoint(Path(checkpoint), Path(folder), merge, model)
    print(f"written to {folder}")


def serve(
    model: str,
    port: int = 8001,
    host: str = "127.0.0.1",
    transfer: Literal["folder", "nccl", "gloo"] = "folder",
    options: Sequence[str] = (),
) -> None:
    """Start a vLLM server for VLLMServerEngine; options after -- go to vLLM, such as -- --tensor-parallel-size 2.

    Args:
        model: hub id or folder of the model, or demo, as in the config of the run.
        port: where it listens.
        host: where it listens. Whoever reaches it can call methods of its workers and send it weights, so use this
            machine or a private network.
        transfer: how weights are sent to it; the same as data.init_args.engine.init_args.transfer of the run.
        options: of vLLM.
    """
    from lightning_agentrl.commands.serve import serve_model

    serve_model(model, port, host, options, transfer)


def play(
    id: str,
    config: str | None = None,
    model: str | None = None,
    kwargs: dict[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Play an environment yourself: you read the prompt that the model would read, with its tokens counted.

    Args:
        id: of the environment, as in a config, such as agentrl_envs:GuessNumber-v0.
        config: config of a run, for its prompts, memory, interaction and model; defaults when not given.
        model: hub id or folder of the model whose chat template and tokenizer count; that of the config, or demo.
        kwargs: arguments of the environment, as '{highest: 9}'.
        seed: of the first episode.
    """
    from lightning_agentrl.commands.play import play_environment
    from lightning_agentrl.commands.quiet import leave_out_noise

    leave_out_noise()
    play_environment(id, None if config is None else Path(config), model, kwargs or {}, seed)


def check_env(
    env: str,
    kwargs: dict[str, Any] | None = None,
    json: str | None = None,
    html: str | None = None,
    train: bool = False,
    seconds: float = 20.0,
    cap: float = 300.0,
    max_prompt_tokens: int = 1024,
) -> None:
    """Check an environment before training on it; exits with 1 if it has errors.

    Args:
        env: id as in a config, such as agentrl_envs:GuessNumber-v0, or the URL of an OpenEnv server.
        kwargs: arguments of the environment, such as {"max_turns": 10}.
        json: file for the certificate as JSON.
        html: file for the certificate as a page.
        train: also train a small model on it, with three seeds, and say whether it climbs.
        seconds: for all checks beside imports and resets.
        cap: most seconds in all; what is missing then is named.
        max_prompt_tokens: of the run that is planned; longer prompts are reported.
    """
    from lightning_agentrl.commands.check_env import check_environment

    passed = check_environment(
        env,
        kwargs or {},
        json_file=None if json is None else Path(json),
        html_file=None if html is None else Path(html),
        train=train,
        seconds=seconds,
        cap=cap,
        most_tokens=max_prompt_tokens,
    )
    if not passed:
        raise SystemExit(1)


def serve_env(
    id: str,
    port: int = 8000,
    host: str = "127.0.0.1",
    kwargs: dict[str, Any] | None = None,
    sessions: int = 64,
    token: str | None = None,
) -> None:
    """Offer an environment as an OpenEnv server, one for each web socket.

    Args:
        id: of the environment, as data.init_args.env.id.
        port: where it listens; 0 for any that is free.
        host: where it listens. An address that other machines reach needs a token.
        kwargs: arguments of the environment, as data.init_args.env.kwargs.
        sessions: most environments at a time.
        token: secret that clients must send. Write '${NAME}' to read it from an environment variable.
    """
    from lightning_agentrl.commands.serve_env import serve_env

    serve_env(id, kwargs or {}, host, port, sessions, token or "")


def new(folder: str) -> None:
    """Write a folder with a commented config, a game of your own, a test of it, and a page of what to do next.

    Args:
        folder: to be made, such as my_agent.
    """
    from lightning_agentrl.tools.new import make_project

    names = make_project(Path(folder))
    there = shlex.quote(folder)
    print(f"written to {folder}: {', '.join(names)}\nnext: cd {there} && agentrl fit --config config.yaml --dry-run")


OF_A_RUN = (*SUBCOMMANDS, "verify-engine", "inspect", "clone")  # take the config of a run
OWN: dict[str, Callable[..., None]] = {
    "new": new,
    "play": play,
    "view": view,
    "export": export,
    "replay": replay,
    "audit-critic": audit_critic,
    "bisect": bisect,
    "serve": serve,
    "check-env": check_env,
    "serve-env": serve_env,
}
OPTIONS = "options"  # of another program, after --
MAY_FOLLOW = {"view": ("other", "folder of a second run, to compare")}  # second arguments without a name, not required


def main() -> None:
    """Run the command of this process."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        # No byte that is typed, and no text of a game, ends a command. What was read before, by who calls it, stays.
        if isinstance(stream, io.TextIOWrapper):
            with suppress(io.UnsupportedOperation):
                stream.reconfigure(errors=errors)
    arguments = sys.argv[1:] = _with_negative_numbers(with_shipped_configs(sys.argv[1:]))
    with one_line_errors():
        if not arguments or arguments[0] in ("-h", "--help"):
            print(HELP, end="")
            return
        if arguments[0] == "--version":
            print(f"agentrl {__version__}")
            return
        try:
            here = os.getcwd()
        except FileNotFoundError:
            raise ConfigError("the working folder was removed; go to one that exists, with cd") from None
        if here not in sys.path:
            sys.path.append(here)  # a user's own module is where the command is run
        if arguments[0] in OWN:
            _run_own(arguments[0], arguments[1:])
            return
        if arguments[0] not in OF_A_RUN:
            raise ConfigError(unknown_command(arguments[0], (*OF_A_RUN, *OWN)))
        if any(argument.split("=")[0].endswith(".help") for argument in arguments):
            from lightning_agentrl.commands import fit  # noqa: F401 - imports the classes that can be named
            from lightning_agentrl.commands.class_help import class_help

            if text := class_help(arguments[1:]):
                print(text, end="")
                return
        arguments = [FLAGS.get(argument, argument) for argument in arguments]
        check_files(arguments[1:])  # what follows takes seconds
        from lightning_agentrl.commands.fit import run
        from lightning_agentrl.commands.quiet import leave_out_noise

        keep_freed_memory()
        leave_out_noise()
        if arguments[0] not in SUBCOMMANDS:
            import_module(f"lightning_agentrl.commands.{arguments[0].replace('-', '_')}").run(arguments[1:])
            return
        sys.argv[1:] = arguments
        run()


def _with_negative_numbers(arguments: Sequence[str]) -> list[str]:
    """Return arguments in which a number such as -1e-5 is joined to the option before it; the parser would take it for
    an option.
    """
    joined: list[str] = []
    for argument in arguments:
        after_option = bool(joined) and joined[-1].startswith("--") and "=" not in joined[-1]
        if after_option and re.fullmatch(r"-(\d+\.?\d*|\.\d+)[eE][-+]?\d+", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _run_own(command: str, arguments: Sequence[str]) -> None:
    from jsonargparse import ArgumentParser

    function, (follows, about) = OWN[command], MAY_FOLLOW.get(command, ("", ""))
    taken = inspect.signature(function).parameters.values()
    alone = [each.name for each in taken if each.default is each.empty]
    named = [each.name for each in taken if each.name not in (*alone, follows, OPTIONS)]
    written = " ".join(["agentrl", command, *map(str.upper, alone), *([f"[{follows.upper()}]"] if follows else [])])
    usage = Usage((*alone, *([follows] if follows else [])), written)

    class Parser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> None:  # type: ignore[override]
            raise ConfigError(explain(message, ex, named, usage)) from ex

    about_it = function.__doc__ and function.__doc__.splitlines()[0]
    parser = Parser(prog=f"agentrl {command}", description=about_it, allow_abbrev=False)
    parser.add_function_arguments(function, as_positional=True, skip={OPTIONS, follows})
    if follows:
        parser.add_argument(follows, nargs="?", type=str | None, default=None, help=about)
    own, options = list(arguments), {}
    if OPTIONS in inspect.signature(function).parameters and "--" in own:
        at = own.index("--")
        own, options = own[:at], {OPTIONS: own[at + 1 :]}
    settings = parser.parse_args([FLAGS.get(argument, argument) for argument in own]).as_dict()
    for name in (name for name, value in settings.items() if value == ""):  # of a variable of the shell that is not set
        raise ConfigError(empty_argument(name, usage))
    try:
        function(**settings, **options)
    except ConfigError:  # knows the place
        raise
    except OSError as error:
        raise ConfigError(file_fault(error)) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
