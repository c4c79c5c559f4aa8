"""Agent programs as a source of episodes, beside environments and task sets."""

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
    """A program that calls a model over HTTP, such as one of OpenAI's or Anthropic's clients; it is not changed.

    It is started for each episode, with one task, and gets the address of the policy as ``OPENAI_BASE_URL`` and
    ``ANTHROPIC_BASE_URL``, the keys ``OPENAI_API_KEY`` and ``ANTHROPIC_API_KEY``, its task as JSON in ``AGENTRL_TASK``,
    a seed in ``AGENTRL_SEED``, and in ``AGENTRL_RESULT`` the name of a file for ``{"reward": ...}``.

    Args:
        command: program and arguments. It starts in the folder of the run's command. Not with ``run``.
        tasks: file with one JSON object per line; each episode has one of them.
        run: a function, as ``module:function``, that is called with the task, in a process for each episode. A number
            that it returns is the reward. Not with ``command``.
        held_out_tasks: file of those that validation plays, each once, in order; ``tasks`` when not given.
        scorer: scores the last text of the assistant by the task's ``answer``; None: the program says its reward.
        preload: modules that the command's interpreter imports once, and then forks; for Python commands only.
        seconds_between_calls: most seconds that the program may take by itself; waiting for a reply does not count.
            An episode of a longer one is lost.
        max_calls: calls after which an episode is truncated, with the value of the next call; None: no limit.
        parallel: whether several calls may wait at once; False: a second one is refused.
        retries: how often a program that failed is started again; its side effects happen again too.
        on_error: reward where the program fails after its first reply; None: the episode is lost.
        environment: names of variables that it gets beside PATH, HOME, LANG, TMPDIR, VIRTUAL_ENV and PYTHONPATH.
        share: its part of all that is played, relative to the other sources.
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
        """Refuse a program or a task file that is not there, before weights are read.

        Raises:
            ValueError: with the key to change.
        """
        if (self.run is None) == (not self.command):
            raise ValueError(f"give either {self.key}.command, a program and its arguments, or {self.key}.run")
        if self.run is not None:
            if not self.run.partition(":")[2]:
                raise ValueError(f"{self.key}.run is '{self.run}'; write module:function")
            if self._module is None:
                raise ValueError(f"{self.key}.run names the module '{self.run.partition(':')[0]}', which is not there")
        elif shutil.which(self.command[0]) is None:
            raise ValueError(f"{self.key}.command names the program '{self.command[0]}', which is not there")
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
        """The kind of source alone: what it is made of may change if ``resume_with_changes`` accepts that."""
        return "agent programs"

    @property
    def files(self) -> str:
        """The files that the program and its tasks are read from, each with a digest of its content."""
        named = [Path(one) for one in (*(self.command[1:] or self.command), self.tasks)]  # without an interpreter
        files = [*([self._module] if self._module else []), *(path for path in named if path.is_file())]
        return ", ".join(f"{path.name} {blake2b(path.read_bytes(), digest_size=8).hexdigest()}" for path in files)

    @property
    def _module(self) -> Path | None:
        """The file of the module of ``run``, which is found without running any code of it."""
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
        """Return such an environment in a thread, which only waits: the program runs in a separate process."""
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
    """Read a task file.

    Raises:
        ValueError: it does not exist, is empty, or a line is no JSON object; with the key to change.
    """
    if not path:
        raise ValueError(f"there are no tasks; give a file with one JSON object per line (key {key})")
    if not Path(path).is_file():
        raise ValueError(f"there is no file of tasks '{path}' (key {key})")
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
        raise ValueError(f"the file of tasks '{path}' is empty (key {key})")
    return tasks
