"""One-turn tasks: a prompt, one reply, and a score instead of an environment."""

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

_THREADS = DaemonThreads()  # threads for scorers


@dataclass(frozen=True)
class Task:
    """A prompt, and the reference answer if the scorer needs one."""

    prompt: str
    answer: str | None = None


class Scorer(ABC):
    """Strategy object that scores replies. Several threads call a scorer at the same time."""

    needs_answer: ClassVar[bool] = True
    key = "scorer"  # config key, set by the scorer's source
    date: RunDate | None = None  # date of the run, set by the scorer's source

    @abstractmethod
    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        """Return the reward of a reply."""

    def start(self, device: torch.device) -> None:  # noqa: B027 - most scorers have nothing to load
        """Prepare for scoring. The source calls this method before the first reply, with the device of the policy."""

    def release(self) -> None:  # noqa: B027
        """Release what :meth:`start` has loaded, at the end of a run; another run may start the scorer again."""


class ExactMatch(Scorer):
    """Score 1 if the reply equals the answer, else 0; case and whitespace do not matter."""

    def score(self, prompt: str, reply: str, answer: str | None) -> float:
        return float(answer is not None and _same(reply, answer))


class PatternMatch(Scorer):
    """Score 1 if the last match of a pattern in the reply equals the answer (without an answer: exists), else 0.

    Args:
        pattern: regular expression; if it has a group, the first group is compared with the answer. Case matters only
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
    """One-turn tasks from a file, drawn at random, as a source of episodes.

    Args:
        path: file with one JSON object per line: ``prompt``, and ``answer`` if the scorer needs an answer.
        scorer: scorer of replies. Default: ExactMatch.
        held_out: file of the tasks for validation. Default: ``path``.
        system: system message of every task.
        share: weight of this source relative to the other sources.
        retries: number of times that a failed score is computed again, for example if a server was busy.
        scorer_timeout_seconds: time limit, in seconds, of the score of a reply, including the wait for other replies. A
            score that takes longer counts as failed. None means no limit.
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
        self.judge: Judge | None = None  # the scorer gives the whole reward

    def check(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: a number is out of range; the message names the key.
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
        """Return an environment with one task per episode."""
        tasks = self._held_out_tasks if held_out else self._tasks
        return OneTurn(tasks, self._scorer, self.system, self.scorer_timeout_seconds)

    def make_worker(self, executor: Executor | None = None, held_out: bool = False) -> EnvWorker:
        """Return a worker of the tasks in a thread, since the scorer may have a model on the policy's device.

        The first call reads both files, so that a faulty file counts as wrong input.

        Raises:
            ValueError: a file cannot be read; the message names the key.
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
    """Environment with one task per episode: the prompt is the observation, and the score of the reply is the reward.

    Args:
        tasks: tasks, from which the seed of an episode selects one.
        scorer: scorer of replies.
        system: system message.
        timeout: time limit of a score, in seconds; None means no limit.
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
                f"the scorer {whose} took longer than {self.timeout:g} s, the limit set by "
                f"{self.scorer.key}_timeout_seconds",
            )
        return "", finite_reward(f"the scorer {whose}", scoring.result()), True, False, {}


def read_tasks(path: str, key: str, needs_answer: bool = False) -> list[Task]:
    """Return the tasks of a file.

    Args:
        path: file with one JSON object per line.
        key: config key that names the file, for error messages.
        needs_answer: whether a task without an answer is an error.

    Raises:
        ValueError: the file does not exist or is empty, or a line is not a task; the message names line and key.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"there is no task file '{path}' (key {key})")
    try:
        text = file.read_text("utf-8-sig")  # Windows editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"the task file '{path}' is not a text in UTF-8: {error} (key {key})") from error
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    tasks = [_task(line, f"line {number} of '{path}'", key, needs_answer) for number, line in lines]
    if not tasks:
        raise ValueError(f"the task file '{path}' is empty (key {key})")
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
        raise ValueError(f"{where} has no answer, which the scorer needs (key {key})")
    return Task(well_formed(entry["prompt"]), None if answer is None else well_formed(str(answer)))
