"""One-turn tasks without an environment: a prompt, one reply, a score."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import torch

from lightning_agentrl.episodes.env_worker import DaemonThreads, EnvWorker
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.judge import Judge, check_timeout, compiled
from lightning_agentrl.episodes.observation import finite_reward, well_formed
from lightning_agentrl.errors import EnvError
from lightning_agentrl.prompts.template import RunDate

_THREADS = DaemonThreads()  # of scorers


@dataclass(frozen=True)
class Task:
    """A prompt, and the answer for scorers that compare replies with one."""

    prompt: str
    answer: str | None = None


class Scorer(ABC):
    """Strategy object: how good a reply is. Called from several threads at a time."""

    needs_answer: ClassVar[bool] = True
    key = "scorer"  # of the config, once the scorer is part of a task set
    date: RunDate | None = None  # of the run

    @abstractmethod
    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        """Return the reward of a reply."""

    def start(self, device: torch.device) -> None:  # noqa: B027 - most scorers have nothing to load
        """Prepare for scoring; called before the first reply, with the device of the policy."""

    def release(self) -> None:  # noqa: B027
        """Give back what :meth:`start` has loaded; called when a run has ended. Another one may start it again."""


class ExactMatch(Scorer):
    """1 for the answer and 0 for anything else; case and white space around and between words do not matter."""

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        return float(answer is not None and _same(reply, answer))


class PatternMatch(Scorer):
    """1 if the last match of a pattern in a reply is the answer. Without an answer, any match counts.

    Args:
        pattern: regular expression; its first group, if it has one, is compared with the answer. Case matters only
            within ``(?-i:...)``.
    """

    needs_answer = False

    def __init__(self, pattern: str) -> None:
        self.pattern = compiled("PatternMatch", pattern)

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        found = list(self.pattern.finditer(reply))
        if not found or answer is None:
            return float(bool(found))
        last = found[-1]
        return float(_same(last[1] or "" if self.pattern.groups else last[0], answer))


def _same(a: str, b: str) -> bool:
    return a.casefold().split() == b.casefold().split()


@dataclass
class TaskSet:
    """One-turn tasks from a file, taken at random.

    Args:
        path: file with one JSON object per line: ``prompt``, and ``answer`` if the scorer needs it.
        scorer: scores replies; ExactMatch when not given.
        held_out: file of the tasks that validation plays; those of ``path`` when not given.
        system: system message of every task.
        share: its part of all that is played, relative to the other sources.
        retries: how often the score of a reply may fail, for example because a server is busy; it is then computed
            again.
        scorer_timeout_seconds: most seconds for the score of a reply, with its wait for other replies. A longer call
            counts as failed. None: no limit.
    """

    path: str
    scorer: Scorer | None = None
    held_out: str | None = None
    system: str = ""
    share: float = 1.0
    retries: int = 2
    scorer_timeout_seconds: float | None = 600.0

    def __post_init__(self) -> None:
        self.key = "data.init_args.envs"
        self.date: RunDate | None = None
        self.judge: Judge | None = None  # its scorer is the whole reward

    def check(self) -> None:
        """Refuse numbers out of range.

        Raises:
            ValueError: with the key to change.
        """
        if self.retries < 0:
            raise ValueError(f"{self.key}.retries must be at least 0, got {self.retries}")
        check_timeout(self.scorer_timeout_seconds, f"{self.key}.scorer_timeout_seconds")

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def label(self) -> str:
        return f"tasks of {self.path}"

    def make(self, held_out: bool = False) -> gymnasium.Env:
        """Return an environment that gives one task per episode."""
        tasks = self._held_out_tasks if held_out else self._tasks
        return OneTurn(tasks, self._scorer, self.system, self.scorer_timeout_seconds)

    def make_worker(self, executor: Executor | None = None, held_out: bool = False) -> EnvWorker:
        """Return such an environment in a thread, since its scorer may hold a model on the device of the policy.

        Both files are read at the first call: a faulty one is wrong input, not an error of an environment.

        Raises:
            ValueError: a file cannot be read; with the key to change.
        """
        _ = self._tasks, self._held_out_tasks
        return EnvWorker(lambda: Environment(partial(self.make, held_out)), executor, self.retries, name=self.name)

    def start(self, device: torch.device) -> None:
        self._scorer.key, self._scorer.date = f"{self.key}.scorer", self.date
        self._scorer.start(device)

    def release(self) -> None:
        self._scorer.release()

    @cached_property
    def _scorer(self) -> Scorer:
        return self.scorer or ExactMatch()

    @cached_property
    def _tasks(self) -> list[Task]:
        return read_tasks(self.path, f"{self.key}.path", self._scorer.needs_answer)

    @cached_property
    def _held_out_tasks(self) -> list[Task]:
        if self.held_out is None:
            return self._tasks
        return read_tasks(self.held_out, f"{self.key}.held_out", self._scorer.needs_answer)


class OneTurn(gymnasium.Env[str, str]):
    """One task per episode: its prompt is the observation, and the reply ends it with its score as reward.

    Args:
        tasks: taken at random, by the seed.
        scorer: scores replies.
        system: system message.
        timeout: most seconds for a score; None: no limit.
    """

    free_text = True
    one_turn = True

    def __init__(self, tasks: Sequence[Task], scorer: Scorer, system: str = "", timeout: float | None = None) -> None:
        if not tasks:
            raise ValueError("OneTurn needs at least one task")
        self.tasks, self.scorer, self.system_prompt = tasks, scorer, system
        self.task, self.timeout = tasks[0], timeout
        self.observation_space = gymnasium.spaces.Text(max_length=2**20, min_length=0)
        self.action_space = gymnasium.spaces.Text(max_length=2**20, min_length=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.task = self.tasks[int(self.np_random.integers(len(self.tasks)))]
        return self.task.prompt, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        whose = type(self.scorer).__name__
        scoring = _THREADS.submit(self.scorer.score, self.task.prompt, action, self.task.answer)
        if wait([scoring], self.timeout).not_done:
            raise EnvError(
                "timeout",
                f"the scorer {whose} took longer than {self.timeout:g} s, the most that "
                f"{self.scorer.key}_timeout_seconds allows",
            )
        return "", finite_reward(f"the scorer {whose}", scoring.result()), True, False, {}


def read_tasks(path: str, key: str, needs_answer: bool = False) -> list[Task]:
    """Return the tasks of a file.

    Args:
        path: JSON lines.
        key: the key of the config that names the file.
        needs_answer: refuse tasks without answer.

    Raises:
        ValueError: one sentence with the line and the key.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file of tasks '{path}' (key {key})")
    try:
        text = file.read_text("utf-8-sig")  # editors of Windows write a mark at the beginning
    except UnicodeDecodeError as error:
        raise ValueError(f"the file of tasks '{path}' is not a text in UTF-8: {error} (key {key})") from error
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    tasks = [_task(line, f"line {number} of '{path}'", key, needs_answer) for number, line in lines]
    if not tasks:
        raise ValueError(f"the file of tasks '{path}' is empty (key {key})")
    return tasks


def _task(line: str, where: str, key: str, needs_answer: bool) -> Task:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error} (key {key})") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f'{where} is not a task; write {{"prompt": "...", "answer": "..."}} (key {key})')
    answer = entry.get("answer")
    if answer is None and needs_answer:
        raise ValueError(f"{where} has no answer, which the scorer compares replies with (key {key})")
    return Task(well_formed(entry["prompt"]), None if answer is None else well_formed(str(answer)))
