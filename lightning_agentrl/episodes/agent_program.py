"""Agent programs as a source of episodes, besides environments and task sets."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from lightning_agentrl.episodes.agent_env import AgentEnv
from lightning_agentrl.episodes.env_worker import EnvWorker
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.judge import Judge
from lightning_agentrl.episodes.tasks import Scorer
from lightning_agentrl.gateway import call
from lightning_agentrl.prompts.template import RunDate


@dataclass
class AgentProgram:
    """An unchanged program that calls a model over HTTP, for example with OpenAI's or Anthropic's client.

    The program is started for each episode, with one task. Its environment variables are the address of the policy in
    ``OPENAI_BASE_URL`` and ``ANTHROPIC_BASE_URL``, the keys ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY``, its task as
    JSON in ``AGENTRL_TASK``, a seed in ``AGENTRL_SEED``, and in ``AGENTRL_RESULT`` the name of a file to which the
    program can write ``{"reward": ...}``.

    Args:
        command: program and arguments; the program starts in the run's working folder. Not with ``run``.
        tasks: file with one JSON object per line; each episode has one of them.
        run: function, as ``module:function``, to call with the task in a separate process for each episode. If the
            function returns a number, this number is the reward. Not with ``command``.
        held_out_tasks: file of the tasks for validation, which uses each task once, in order. Default: ``tasks``.
        scorer: scorer of the last text of the assistant by the task's ``answer``; None: the program reports its reward.
        preload: modules that a Python interpreter imports once, before it forks for each episode; only if ``command``
            is a Python command.
        seconds_between_calls: time limit between a reply and the program's next call, in seconds. After this
            time, the episode is lost.
        max_calls: number of calls after which an episode is truncated and bootstrapped from the value of the next call;
            None: no limit.
        parallel: whether several calls may wait at once; with False, a second call is refused.
        retries: number of times that a failed program is restarted; a restart repeats the program's side effects.
        on_error: reward if the program fails after its first reply; None: the episode is lost.
        environment: names of environment variables that the program inherits in addition to PATH, HOME, LANG, TMPDIR,
            VIRTUAL_ENV and PYTHONPATH.
        share: weight of this source relative to the other sources.
    """

    command: list[str] = field(default_factory=list)
    tasks: str = ""
    run: str | None = None
    held_out_tasks: str | None = None
    scorer: Scorer | None = None
    preload: list[str] = field(default_factory=list)
    seconds_between_calls: float = 60.0
    max_calls: int | None = 50
    parallel: bool = True
    retries: int = 0
    on_error: float | None = None
    environment: list[str] = field(default_factory=list)
    share: float = 1.0

    def __post_init__(self) -> None:
        self.key = "data.init_args.env"
        self.date: RunDate | None = None
        self.judge: Judge | None = None
        self.judge_timeout_seconds: float | None = None

    def check(self) -> None:
        """Check that the program and the task files exist, before weights are loaded.

        Raises:
            ValueError: a file does not exist, or arguments contradict each other; the message names the key.
        """
        if (self.run is None) == (not self.command):
            raise ValueError(f"give either {self.key}.command (a program and its arguments) or {self.key}.run")
        if self.run is not None:
            if not self.run.partition(":")[2]:
                raise ValueError(f"{self.key}.run is '{self.run}'; write module:function")
            if self._module is None:
                raise ValueError(f"{self.key}.run: there is no module '{self.run.partition(':')[0]}'")
        elif shutil.which(self.command[0]) is None:
            raise ValueError(f"{self.key}.command: there is no program '{self.command[0]}'")
        if self.preload and self.command and not Path(self.command[0]).name.startswith("python"):
            raise ValueError(f"{self.key}.preload needs a command that begins with python, got '{self.command[0]}'")
        for name in self.command[1:]:
            if name.endswith(".py") and not Path(name).is_file():
                raise ValueError(f"{self.key}.command names the file '{name}', which does not exist")
        _ = self._tasks, self._held_out_tasks

    @property
    def name(self) -> str:
        if self.run is not None:
            return f"agent {self.run.partition(':')[0]}"
        script = next((Path(one).stem for one in self.command if one.endswith(".py")), Path(self.command[0]).stem)
        return f"agent {script}"

    @property
    def label(self) -> str:
        """Description of the kind of source, without details, which ``resume_with_changes`` may change."""
        return "agent programs"

    @property
    def files(self) -> str:
        """Names and content hashes of the files of the program and its tasks."""
        named = [Path(one) for one in (*(self.command[1:] or self.command), self.tasks)]  # the interpreter is left out
        files = [*([self._module] if self._module else []), *(path for path in named if path.is_file())]
        return ", ".join(f"{path.name} {blake2b(path.read_bytes(), digest_size=8).hexdigest()}" for path in files)

    @property
    def _module(self) -> Path | None:
        """The file of the module of ``run``, found without importing the module."""
        folders, path = None, None
        for part in (self.run or "").partition(":")[0].split("."):
            spec = PathFinder.find_spec(part, folders)
            if spec is None:
                return None
            path, folders = spec.origin, list(spec.submodule_search_locations or ())
        return None if path is None else Path(path)

    @property
    def _program(self) -> Sequence[str]:
        if self.run is None:
            return self.command
        assert self._module is not None
        depth = self.run.partition(":")[0].count(".") + (self._module.name == "__init__.py")
        return [sys.executable, call.__file__, str(self._module.resolve().parents[depth]), self.run]

    def make(self, held_out: bool = False) -> AgentEnv:
        """Return an environment whose observations are the program's calls."""
        return AgentEnv(
            self._program,
            self._held_out_tasks if held_out else self._tasks,
            None if self.scorer is None else self._score,
            held_out,
            self.seconds_between_calls,
            self.max_calls,
            self.parallel,
            self.on_error,
            self.environment,
            self.preload,
        )

    def make_worker(self, executor: Executor | None = None, held_out: bool = False) -> EnvWorker:
        """Return a worker of an agent program in a thread, which only waits for the program's process."""
        return EnvWorker(lambda: Environment(lambda: self.make(held_out)), executor, self.retries, name=self.name)

    def start(self, device: torch.device) -> None:
        if self.scorer is not None:
            self.scorer.key, self.scorer.date = f"{self.key}.scorer", self.date
            self.scorer.start(device)

    def release(self) -> None:
        if self.scorer is not None:
            self.scorer.release()

    def _score(self, task: Mapping[str, Any], text: str) -> float:
        assert self.scorer is not None
        answer = task.get("answer")
        return self.scorer.score(json.dumps(task), text, None if answer is None else str(answer))

    @cached_property
    def _tasks(self) -> Sequence[Mapping[str, Any]]:
        return _read(self.tasks, f"{self.key}.tasks")

    @cached_property
    def _held_out_tasks(self) -> Sequence[Mapping[str, Any]]:
        held_out = self.held_out_tasks
        return self._tasks if held_out is None else _read(held_out, f"{self.key}.held_out_tasks")


def _read(path: str, key: str) -> list[Mapping[str, Any]]:
    """Read a task file; ``key`` is the config key that names the file, for error messages.

    Raises:
        ValueError: the file does not exist or is empty, or a line is not a JSON object.
    """
    if not path:
        raise ValueError(f"there are no tasks; give a file with one JSON object per line (key {key})")
    if not Path(path).is_file():
        raise ValueError(f"there is no task file '{path}' (key {key})")
    tasks: list[Mapping[str, Any]] = []
    for number, line in enumerate(Path(path).read_text("utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of '{path}' is not JSON: {error} (key {key})") from None
        if not isinstance(task, dict):
            raise ValueError(f"line {number} of '{path}' is not a JSON object (key {key})")
        tasks.append(task)
    if not tasks:
        raise ValueError(f"the task file '{path}' is empty (key {key})")
    return tasks
