"""Sources of episodes: an environment, or a set of tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import torch

from lightning_agentrl.episodes.agent_program import AgentProgram
from lightning_agentrl.episodes.env_worker import EnvWorker, make_worker, no_timeout
from lightning_agentrl.episodes.judge import Judge, check_timeout
from lightning_agentrl.episodes.recipe import ENV, Recipe
from lightning_agentrl.episodes.tasks import TaskSet
from lightning_agentrl.episodes.wording import Wording
from lightning_agentrl.errors.secrets import check_secrets
from lightning_agentrl.prompts.memory import FullMemory, Memory, WindowMemory
from lightning_agentrl.prompts.template import RunDate
from lightning_agentrl.types.plain_config import check_kind

ENVS = "data.init_args.envs"  # the key of several sources


@dataclass
class EnvConfig:
    """An environment as ``gymnasium.make`` takes it.

    Args:
        id: registered id, ``module:Name-v0`` imports the module first.
        kwargs: arguments of the environment. ``${NAME}`` in a text stands for an environment variable; that is how
            secrets are given, and configs, records and logs hold the name only.
        share: its part of all that is played, relative to the other sources.
        retries: how often one reset or step may fail: the environment is made again, the episode is replayed from its
            seed and actions, and the call is repeated. Also how often the judge may, at one turn.
        worker: where the environment runs: a ``thread`` of the trainer, or a ``process`` of its own, which runs in
            parallel and can be ended when it hangs. None: what the environment declares, else a thread.
        timeout_seconds: most seconds for making the environment, a reset, a step or a picture, each by itself. One that
            takes longer is ended, which counts as an error of the environment. None: no limit. Needs a process.
        wording: words of prompts and actions that replace those of the environment; None: none.
        judge: adds to the reward of each turn; None: the environment's reward is all.
        judge_timeout_seconds: most seconds for the verdict on a turn, with its wait for other turns. A longer call
            counts as failed. None: no limit.
    """

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    retries: int = 2
    share: float = 1.0
    worker: Literal["thread", "process"] | None = None
    timeout_seconds: float | None = None
    wording: Wording | None = None
    judge: Judge | None = None
    judge_timeout_seconds: float | None = 600.0

    def __post_init__(self) -> None:
        self.key = ENV
        self.date: RunDate | None = None
        self.texts: tuple[str, ...] = ()  # attributes that the system text of the config shows
        self._expert = False
        check_secrets(self.kwargs, "kwargs")

    def check(self) -> None:
        """Refuse numbers out of range, and a timeout in a thread.

        Raises:
            ValueError: with the key to change.
        """
        if self.retries < 0:
            raise ValueError(f"{self.key}.retries must be at least 0, got {self.retries}")
        if self.worker not in (None, "thread", "process"):
            raise ValueError(f"{self.key}.worker must be thread, process or null, got '{self.worker}'")
        check_timeout(self.timeout_seconds, f"{self.key}.timeout_seconds")
        check_timeout(self.judge_timeout_seconds, f"{self.key}.judge_timeout_seconds")
        if self.timeout_seconds is not None and self.worker == "thread":
            raise ValueError(no_timeout(self.timeout_seconds, self.key))

    @property
    def name(self) -> str:
        return self.id.split(":")[-1]

    @property
    def label(self) -> str:
        return f"{self.id} with {dict(sorted(self.kwargs.items()))}"

    def start(self, device: torch.device) -> None:
        """Prepare the judge, if there is one."""
        if self.judge is not None:
            self.judge.key, self.judge.date = f"{self.key}.judge", self.date
            self.judge.timeout = self.judge_timeout_seconds
            self.judge.start(device)

    def release(self) -> None:
        """Let the judge, if there is one, give back what it holds."""
        if self.judge is not None:
            self.judge.release()

    def with_expert(self) -> EnvConfig:
        """Return the source of the same environments in which the scripted player speaks, and no judge."""
        other = copy(self)
        other._expert, other.judge = True, None
        return other

    def make(self) -> gymnasium.Env:
        """Build the environment.

        Raises:
            ValueError: gymnasium does not know the id or the arguments; with the key to change.
        """
        return self._recipe.make()

    def check_id(self) -> None:
        """Import the environment without making it.

        Raises:
            ValueError: gymnasium does not know the id; with the key to change.
        """
        if self._recipe.load() is None:
            self.make()

    def make_worker(self, executor: Executor | None = None, held_out: bool = False) -> EnvWorker:
        """Make the environment in its thread or process; held-out episodes differ by their seeds only.

        Raises:
            ValueError: the environment cannot be made, or cannot run there; with the key to change.
        """
        return make_worker(self._recipe, executor, self.worker, self.timeout_seconds, self.retries, self.wording)

    @property
    def _recipe(self) -> Recipe:
        return Recipe(self.id, self.kwargs, self.key, expert=self._expert, texts=self.texts)


Source = EnvConfig | TaskSet | AgentProgram


def memory_for(sources: Sequence[Source]) -> Memory:
    """Return the default memory: the whole history for an agent program, else the last turn."""
    return FullMemory() if any(isinstance(source, AgentProgram) for source in sources) else WindowMemory()


def all_sources(
    env: EnvConfig | AgentProgram | Mapping[str, Any] | None, envs: Sequence[Source] | None
) -> list[Source]:
    """Return all sources in the order in which they were given, each with its key.

    Args:
        env: the only one; a mapping has the arguments of :class:`EnvConfig`.
        envs: all of them.

    Raises:
        ValueError: nothing is given, both forms are, or a number is out of range; with the key to change.
    """
    env = EnvConfig(**env) if isinstance(env, Mapping) else check_kind(env, EnvConfig | AgentProgram, ENV)
    for source in check_kind(envs, list, ENVS) or ():
        check_kind(source, TaskSet | EnvConfig | AgentProgram, ENVS)
    if env is not None and envs is not None:
        raise ValueError(f"{ENV} is the short form of {ENVS} for one environment; give one of the two, the other null")
    sources: list[Source] = [env] if env is not None else [*(envs or ())]
    if not sources:
        raise ValueError(
            f"there is nothing to play; give an environment (key {ENV}) or a list of environments and task sets (key "
            f"{ENVS})"
        )
    for place, source in enumerate(sources):
        source.key = ENV if env is not None else f"{ENVS}[{place}]"
        if not 0 < source.share < math.inf:
            raise ValueError(f"{source.key}.share must be above 0 and finite, got {source.share}")
        source.check()
    return sources
