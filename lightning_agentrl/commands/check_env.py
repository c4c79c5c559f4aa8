"""`agentrl check-env`: write the certificate of an environment, or check that an agent program is deterministic."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_agentrl.commands.files import PAGE, make_room_for, naming_argument, write
from lightning_agentrl.errors import EnvError
from lightning_agentrl.errors.secrets import check_secrets
from lightning_agentrl.tools.check_env.certificate import Certificate, certify, recipe_of
from lightning_agentrl.tools.check_env.page import lines, page


def check_env(
    env: str | None = None,
    kwargs: dict[str, Any] | None = None,
    json: Path | None = None,
    html: Path | None = None,
    train: bool = False,
    seconds: float = 20.0,
    cap: float = 300.0,
    max_prompt_tokens: int = 1024,
    agent: str | None = None,
    tasks: str | None = None,
    model: str | None = None,
    environment: list[str] | None = None,
) -> bool:
    """Check an environment, or an agent program, before training; exit with 1 if it has errors.

    Args:
        env: id as in a config, such as agentrl_envs:GuessNumber-v0, or the URL of an OpenEnv server.
        kwargs: arguments of the environment, such as '{max_turns: 10}'.
        json: output file for the certificate as JSON.
        html: output file for the certificate as a page.
        train: also train a small model with three seeds and report whether its return rises.
        seconds: time limit of the checks, without imports and resets.
        cap: time limit in seconds of the whole command; the certificate names the checks that are missing.
        max_prompt_tokens: prompt limit of the planned run; report longer prompts.
        agent: command line of an agent program to check instead of an environment, such as "python agent.py". The
            program is run twice with the same replies and must make the same calls.
        tasks: task file of --agent.
        model: hub id or folder of a model whose chat template formats the tool calls in the replies to --agent.
            Default: the agent gets the tool calls as messages.
        environment: names of environment variables that --agent inherits, as data.init_args.env.init_args.environment.
    """
    if (env is None) == (agent is None):
        raise ValueError("give either the id of an environment or --agent with the command line of an agent program")
    if agent is not None:
        return check_agent(agent, tasks, model, environment or (), seconds)
    assert env is not None
    return check_environment(env, kwargs or {}, json, html, train, seconds, cap, max_prompt_tokens)


def check_environment(
    env: str,
    kwargs: Mapping[str, Any],
    json_file: Path | None,
    html_file: Path | None,
    train: bool,
    seconds: float,
    cap: float,
    most_tokens: int,
) -> bool:
    """Check an environment, print and write its certificate, and return whether it has no errors.

    Raises:
        ValueError: a value is out of range, a file cannot be written, or an argument contains a secret.
    """
    check_secrets(recipe_of(env, kwargs)[1])
    for name, value in (("seconds", seconds), ("cap", cap), ("max_prompt_tokens", most_tokens)):
        if not value > 0:
            raise ValueError(f"--{name} must be above 0, got {value}")
    for file, begins, argument in ((json_file, b"{", "json"), (html_file, PAGE, "html")):
        if file is not None:
            make_room_for(file, begins, argument)
    if json_file is not None and html_file is not None and json_file.resolve() == html_file.resolve():
        raise ValueError(f"--json and --html are the same file '{html_file}'; name another one (argument --html)")
    certificate = certify(env, kwargs, seconds, cap, most_tokens)
    if train:
        certificate.train = _trained(certificate, *recipe_of(env, kwargs))
    print("\n".join(lines(certificate)))
    if json_file is not None:
        write(json_file, json.dumps(certificate.plain(), indent=1) + "\n")
    if html_file is not None:
        write(html_file, page(certificate))
    return certificate.passed


# Seeds of an agent's episodes, and the largest number of calls in each episode.
AGENT_SEEDS, AGENT_CALLS = (0, 1, 2), 20


def check_agent(agent: str, tasks: str | None, model: str | None, environment: Sequence[str], seconds: float) -> bool:
    """Run an agent program twice with the same replies; print and return whether it makes the same calls.

    Args:
        agent: command line of the program.
        tasks: file of tasks, one JSON object per line.
        model: folder or hub id of a model whose chat template formats tool calls; None: tool calls are passed as
            messages.
        environment: names of environment variables that the program inherits.
        seconds: time limit between two calls, in seconds.

    Raises:
        ValueError: the program or the task file does not exist, or the chat template does not support tools.
    """
    from lightning_agentrl.models.loading import load_tokenizer
    from lightning_agentrl.prompts.template import ChatTemplate
    from lightning_agentrl.rollout import AgentProgram
    from lightning_agentrl.tools.check_env.agent import Probe, replay_agent

    program = AgentProgram(shlex.split(agent), tasks or "", environment=list(environment), on_error=0.0)
    program.seconds_between_calls, program.max_calls, program.key = seconds, AGENT_CALLS, "agent"
    program.check()
    with naming_argument():
        template = None if model is None else ChatTemplate(load_tokenizer(model))
    try:
        same, differs = replay_agent(program.make, Probe(template), AGENT_SEEDS)
    except EnvError as error:
        print(f"error: {error}")
        return False
    if differs:
        print(
            f"error: '{agent}' is not deterministic, so a run with it cannot be resumed: {differs}. Put no clock, "
            "random id, set or temporary path into prompts, and seed random numbers with AGENTRL_SEED."
        )
        return False
    print(f"'{agent}' is deterministic: {same} calls of {len(AGENT_SEEDS)} episodes were the same in a second run")
    return True


def _trained(certificate: Certificate, env_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of training, or why training was not tried; errors must not lose the certificate."""
    if not certificate.passed:
        return _not_tried("there are errors to mend first")
    if certificate.texts is None or not (returns := certificate.texts.pop("returns")):
        return _not_tried("the exam was cut before its end")
    from lightning_agentrl.commands.check_train import Texts
    from lightning_agentrl.commands.check_train import train as train_small

    try:
        return train_small(env_id, kwargs, Texts(**certificate.texts), returns)
    except (EnvError, ValueError) as error:
        return _not_tried(f"it ended with an error: {error}")


def _not_tried(why: str) -> dict[str, Any]:
    return {"verdict": "not tried", "said": f"not tried: {why}", "curves": [], "points": []}
