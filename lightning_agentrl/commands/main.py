"""The command `agentrl`: its subcommands, and what happens around each of them."""

from __future__ import annotations

import inspect
import io
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_agentrl import __version__
from lightning_agentrl.commands.ending import one_line_errors
from lightning_agentrl.commands.files import with_shipped_configs
from lightning_agentrl.errors import ConfigError, Problem, closest
from lightning_agentrl.errors.config_errors import options_of
from lightning_agentrl.models.allocator import keep_freed_memory

HELP = """usage: agentrl COMMAND [OPTIONS]

Multi-turn reinforcement learning of language and vision-language agents.

train
  fit            train the policy
  validate       evaluate the policy on held-out seeds
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
  agentrl fit --config quickstart --dry-run       show sizes, memory and one prompt, then stop
  agentrl fit --config quickstart --quiet         show warnings and results only
  agentrl fit --config quickstart --print_config  print every key with its value
  agentrl fit --model.help PPOAgent               list the keys of a class
  agentrl validate --config quickstart --ckpt_path last
  agentrl view runs/quickstart
  agentrl COMMAND --help                          list the arguments of a command
  agentrl --version
"""
# The parser takes flags as options with a value.
FLAGS = {f"--{flag}": f"--{flag.replace('-', '_')}=true" for flag in ("dry-run", "quiet", "train", "serve")}


def view(
    run: str,
    other: str | None = None,
    out: str | None = None,
    last: int | None = None,
    serve: bool = False,
    port: int | None = None,
) -> None:
    """Write the run viewer: one offline page of a run or of two runs; list the runs of a folder with several.

    Args:
        run: folder of a run with the callback TurnLog, or a folder of runs to list.
        other: folder of a second run, to compare.
        out: file of the page. Default: view.html in the folder of the run, or compare.html for two runs.
        last: number of last iterations to show. Default: all.
        serve: serve the page to browsers of this machine and update it while the run trains.
        port: port of --serve, or 0 for a free one. Default: 8002. Browsers store stars and notes per port.
    """
    from lightning_agentrl.commands.view import view_runs

    view_runs(Path(run), None if other is None else Path(other), None if out is None else Path(out), last, serve, port)


def replay(run: str, iteration: int | None = None) -> None:
    """Rerun one iteration from the nearest earlier checkpoint and compare it bit by bit; exit with 1 if it differs.

    Args:
        run: folder of the run with config.yaml, chain and checkpoints. Of several versions, the newest is used.
        iteration: number of the iteration, from 1. Default: the last one.
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
    """Compare a critic's values and the estimators' advantages with returns measured by playing on from each state.

    Args:
        run: folder of the run with config.yaml and checkpoints. Of several versions, the newest is used.
        checkpoint: checkpoint of the run. Default: the newest one. The audit plays the next rollout without training.
        branches: number of episodes to play from each state.
        every: measure the state of every n-th turn, and the first state of each episode.
        out: file of the page. Default: audit.html in the folder of the run.
    """
    from lightning_agentrl.commands.audit_critic import audit_run
    from lightning_agentrl.commands.ending import leave_out_noise

    leave_out_noise()
    print(audit_run(Path(run), checkpoint, branches, every, None if out is None else Path(out)))


def bisect(first: str, second: str, tolerance: float = 1e-5) -> None:
    """Find where two runs diverge: the first difference of any size, and the first beyond the tolerance.

    Args:
        first: folder of a run. Of several versions, the newest is used.
        second: folder of another run.
        tolerance: largest accepted difference; relative for numbers above 1.
    """
    from lightning_agentrl.tools.replay import bisect_runs

    print("\n".join(bisect_runs(Path(first), Path(second), tolerance)))


def export(checkpoint: str, folder: str, merge: bool | None = None, model: str | None = None) -> None:
    """Write the policy of a checkpoint as a transformers folder.

    Args:
        checkpoint: a checkpoint of `agentrl fit`.
        folder: output folder; it must be empty or not exist.
        merge: merge adapters into the model (default), or write the adapters alone.
        model: hub id or folder of the base model, if it moved after the run.
    """
    from lightning_agentrl.commands.export import export_checkpoint

    export_checkpoint(Path(checkpoint), Path(folder), merge, model)
    print(f"written to {folder}")


def serve(
    model: str,
    port: int = 8001,
    host: str = "127.0.0.1",
    options: Sequence[str] = (),
) -> None:
    """Start a vLLM server for VLLMServerEngine; options after -- go to vLLM, such as -- --tensor-parallel-size 2.

    Args:
        model: hub id or folder of the model, or demo; the same as in the config of the run.
        port: port to listen on.
        host: address to listen on. Every client can call worker methods and send weights, so use this machine or a
            private network.
        options: options of vLLM.
    """
    from lightning_agentrl.commands.serve import serve_model

    serve_model(model, port, host, options)


def play(
    id: str,
    config: str | None = None,
    model: str | None = None,
    kwargs: dict[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Play an environment yourself: read the prompt of the model with its token count, and type the reply.

    Args:
        id: id of the environment, as in a config, such as agentrl_envs:GuessNumber-v0.
        config: config of a run, for its prompts, memory, interaction and model. Default: the default of each key.
        model: hub id or folder of the model with the chat template and tokenizer. Default: the config's model, or demo.
        kwargs: arguments of the environment, such as '{highest: 9}'.
        seed: seed of the first episode.
    """
    from lightning_agentrl.commands.ending import leave_out_noise
    from lightning_agentrl.commands.play import play_environment

    leave_out_noise()
    play_environment(id, None if config is None else Path(config), model, kwargs or {}, seed)


def check_env(
    env: str | None = None,
    kwargs: dict[str, Any] | None = None,
    json: str | None = None,
    html: str | None = None,
    train: bool = False,
    seconds: float = 20.0,
    cap: float = 300.0,
    max_prompt_tokens: int = 1024,
    agent: str | None = None,
    tasks: str | None = None,
    model: str | None = None,
    environment: list[str] | None = None,
) -> None:
    """Check an environment, or an agent program, before training; exit with 1 if it has errors.

    Args:
        env: id as in a config, such as agentrl_envs:GuessNumber-v0, or the URL of an OpenEnv server.
        kwargs: arguments of the environment, such as '{max_turns: 10}'.
        json: file for the certificate as JSON.
        html: file for the certificate as a page.
        train: also train a small model with three seeds and report whether its return rises.
        seconds: time limit of the checks, without imports and resets.
        cap: time limit in seconds of the whole command; the certificate names the checks that are missing.
        max_prompt_tokens: prompt limit of the planned run; report longer prompts.
        agent: command line of an agent program instead of an environment, such as "python agent.py": play it twice
            with the same replies and report whether it makes the same calls.
        tasks: task file of --agent.
        model: hub id or folder of a model, in whose form the probing replies of --agent call tools. Default: the agent
            is given the calls as messages.
        environment: names of variables that --agent gets, as data.init_args.env.init_args.environment.
    """
    from lightning_agentrl.commands.check_env import check_agent, check_environment

    if (env is None) == (agent is None):
        raise ValueError("give either the id of an environment or --agent with the command line of an agent program")
    if agent is not None:
        if not check_agent(agent, tasks, model, environment or (), seconds):
            raise SystemExit(1)
        return
    assert env is not None
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
    """Start an OpenEnv server for an environment, with one instance per web socket.

    Args:
        id: id of the environment, as data.init_args.env.id.
        port: port to listen on, or 0 for a free one.
        host: address to listen on. An address that other machines can reach requires a token.
        kwargs: arguments of the environment, as data.init_args.env.kwargs.
        sessions: largest number of concurrent environments.
        token: secret that clients must send. Write '${NAME}' to read it from an environment variable.
    """
    from lightning_agentrl.commands.serve_env import serve_env

    serve_env(id, kwargs or {}, host, port, sessions, token or "")


def serve_policy(
    checkpoint: str,
    host: str = "127.0.0.1",
    port: int = 8003,
    token: str | None = None,
    model: str | None = None,
    max_reply_tokens: int | None = None,
    temperature: float | None = None,
) -> None:
    """Start a server of a trained policy, which its agent calls as in training: OpenAI's and Anthropic's protocols.

    Args:
        checkpoint: a checkpoint of `agentrl fit`, or a folder written by `agentrl export`.
        host: address to listen on. An address that other machines can reach requires a token.
        port: port to listen on, or 0 for a free one.
        token: secret that clients must send as their API key. Write '${NAME}' to read it from an environment variable.
        model: hub id or folder of the base model, if it moved after the run.
        max_reply_tokens: most tokens of a reply. Default: that of the run, or 512 for a folder.
        temperature: of sampling, 0 for the most likely tokens. Default: that of the run, or 1 for a folder.
    """
    from lightning_agentrl.commands.ending import leave_out_noise
    from lightning_agentrl.commands.serve_policy import serve_policy as run_server

    leave_out_noise()
    run_server(Path(checkpoint), host, port, token or "", model, max_reply_tokens, temperature)


def new(folder: str) -> None:
    """Write a project: a commented config, a game, a test of the game, and a page with the next steps.

    Args:
        folder: folder to create, such as my_agent.
    """
    from lightning_agentrl.tools.new import make_project

    names = make_project(Path(folder))
    there = shlex.quote(folder)
    print(f"written to {folder}: {', '.join(names)}\nnext: cd {there} && agentrl fit --config config.yaml --dry-run")


OF_A_RUN = ("fit", "validate", "verify-engine", "inspect", "clone")  # commands with the config of a run
OWN: dict[str, Callable[..., None]] = {
    command.__name__.replace("_", "-"): command
    for command in (new, play, view, export, replay, audit_critic, bisect, serve, check_env, serve_env, serve_policy)
}
OPTIONS = "options"  # of another program, after --
MAY_FOLLOW = {  # optional positional arguments behind the others
    "view": ("other", "folder of a second run, to compare"),
    "check-env": ("env", "id as in a config, such as agentrl_envs:GuessNumber-v0, or the URL of an OpenEnv server"),
}


def main() -> None:
    """Run the command of this process."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        # no byte that is typed, and no text of a game, ends a command
        if isinstance(stream, io.TextIOWrapper):
            with suppress(io.UnsupportedOperation):
                stream.reconfigure(errors=errors)
    with one_line_errors():
        arguments = [FLAGS.get(argument, argument) for argument in sys.argv[1:]]
        if not arguments or arguments[0] in ("-h", "--help"):
            print(HELP, end="")
            return
        if arguments[0] == "--version":
            print(f"agentrl {__version__}")
            return
        sys.path.append("")  # a user's own module is where the command is run
        if arguments[0] in OWN:
            _run_own(arguments[0], arguments[1:])
            return
        if arguments[0] not in OF_A_RUN:
            known = (*OF_A_RUN, *OWN)
            if arguments[0].startswith("-"):
                raise ConfigError(Problem("the command is missing", suggestion=f"agentrl fit {arguments[0]} ..."))
            what = f"there is no command '{arguments[0]}'"
            raise ConfigError(Problem(what, known=known, suggestion=closest(arguments[0], known)))
        sys.argv[1:] = arguments = with_shipped_configs(arguments)
        from lightning_agentrl.commands.ending import leave_out_noise
        from lightning_agentrl.commands.fit import run

        keep_freed_memory()
        leave_out_noise()
        if arguments[0] in ("fit", "validate"):
            run()
        else:
            import_module(f"lightning_agentrl.commands.{arguments[0].replace('-', '_')}").run(arguments[1:])


def _run_own(command: str, arguments: Sequence[str]) -> None:
    """Run a command whose arguments are those of a function."""
    from jsonargparse import ArgumentError, ArgumentParser

    function, (follows, about) = OWN[command], MAY_FOLLOW.get(command, ("", ""))
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
        parser.add_argument(follows, nargs="?", type=str | None, default=None, help=about)
    try:
        settings = parser.parse_args(own).as_dict()
    except ArgumentError as error:
        raise ConfigError(f"{str(error).splitlines()[0]}; see agentrl {command} --help") from error
    try:
        function(**settings, **options)
    except ConfigError:  # has its place
        raise
    except OSError as error:
        what = f"'{error.filename}' cannot be used: {error.strerror}" if error.filename else str(error)
        raise ConfigError(what) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
