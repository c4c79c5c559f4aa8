"""Sources of episodes: environments, task sets and agent programs."""

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

ENVS = "data.init_args.envs"  # config key of a list of sources


@dataclass
class EnvConfig:
    """A gymnasium environment as a source of episodes.

    Args:
        id: registered id; ``module:Name-v0`` imports the module first.
        kwargs: arguments of the environment. ``${NAME}`` in a text stands for an environment variable. Use
            variables for secrets: configs, records and logs contain only the name.
        share: weight of this source relative to the other sources.
        retries: number of times that a failed reset or step is repeated, after the environment was created again and
            the episode replayed from its seed and actions; also the number of retries of the judge at one turn.
        worker: where the environment runs: ``thread`` is a thread of the trainer, ``process`` a separate process, which
            runs in parallel and can be stopped if it hangs. Default: the environment's declaration, else a thread.
        timeout_seconds: time limit, in seconds, of each creation, reset, step and rendering of the environment. A call
            that takes longer is stopped and counts as the environment's error. None means no limit. A limit requires a
            process.
        wording: texts of prompts and actions that replace those of the environment.
        judge: judge that adds to the reward of each turn; with None, only the environment's reward counts.
        judge_timeout_seconds: time limit, in seconds, of the verdict on a turn, including the wait for other turns. A
            verdict that takes longer counts as failed. None means no limit.
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
        self.texts: tuple[str, ...] = ()  # names of attributes that the system text of the config contains
        self._expert = False
        check_secrets(self.kwargs, "kwargs")

    def check(self) -> None:
        """Check the arguments.

        Raises:
            ValueError: a number is out of range, or a thread has a timeout; the message names the key.
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
        """Prepare the judge, if the source has a judge."""
        if self.judge is not None:
            self.judge.key, self.judge.date = f"{self.key}.judge", self.date
            self.judge.timeout = self.judge_timeout_seconds
            self.judge.start(device)

    def release(self) -> None:
        """Release the judge's resources, if there is a judge."""
        if self.judge is not None:
            self.judge.release()

    def with_expert(self) -> EnvConfig:
        """Return a source of the same environments that adds the scripted player's actions and has no judge."""
        other = copy(self)
        other._expert, other.judge = True, None
        return other

    def make(self) -> gymnasium.Env:
        """Build the environment.

        Raises:
            ValueError: the id or an argument is wrong; the message names the key.
        """
        return self._recipe.make()

    def check_id(self) -> None:
        """Import the environment without creating it.

        Raises:
            ValueError: the id is not registered; the message names the key.
        """
        if self._recipe.load() is None:
            self.make()

    def make_worker(self, executor: Executor | None = None, held_out: bool = False) -> EnvWorker:
        """Create the environment in its thread or process. ``held_out`` has no effect: only the seeds differ.

        Raises:
            ValueError: the environment cannot be created, or cannot run in this place; the message names the key.
        """
        return make_worker(self._recipe, executor, self.worker, self.timeout_seconds, self.retries, self.wording)

    @property
    def _recipe(self) -> Recipe:
        return Recipe(self.id, self.kwargs, self.key, expert=self._expert, texts=self.texts)


Source = EnvConfig | TaskSet | AgentProgram


def memory_for(sources: Sequence[Source]) -> Memory:
    """Return the default memory: the whole history for agent programs, the last turn for other sources."""
    return FullMemory() if any(isinstance(source, AgentProgram) for source in sources) else WindowMemory()


def all_sources(
    env: EnvConfig | AgentProgram | Mapping[str, Any] | None, envs: Sequence[Source] | None
) -> list[Source]:
    """Return the checked sources of a data module in order, and set their config keys.

    Args:
        env: single source; a mapping holds the arguments of :class:`EnvConfig`.
        envs: list of sources.

    Raises:
        ValueError: none or both arguments are given, or a number is out of range; the message names the key.
    """
    env = EnvConfig(**env) if isinstance(env, Mapping) else check_kind(env, EnvConfig | AgentProgram, ENV)
    for source in check_kind(envs, list, ENVS) or ():
        check_kind(source, TaskSet | EnvConfig | AgentProgram, ENVS)
    if env is not None and envs is not None:
        raise ValueError(f"{ENV} is the short form of {ENVS} for one environment; set only one of them")
    sources: list[Source] = [env] if env is not None else [*(envs or ())]
    if not sources:
        raise ValueError(
            f"there is no environment; give one (key {ENV}), or a list of environments and task sets (key {ENVS})"
        )
    for place, source in enumerate(sources):
        source.key = ENV if env is not None else f"{ENVS}[{place}]"
        if not 0 < source.share < math.inf:
            raise ValueError(f"{source.key}.share must be above 0 and finite, got {source.share}")
        source.check()
    return sources
