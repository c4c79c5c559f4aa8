"""Where an environment runs: in a thread, in a process of its own, or inline; by what is asked and what it declares.

It imports nothing that trains, so that a server of environments begins at once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Literal

from lightning_agentrl.episodes.contract import checked_worker
from lightning_agentrl.episodes.env_process import ProcessEnvironment
from lightning_agentrl.episodes.env_worker import EnvWorker
from lightning_agentrl.episodes.environment import Environment, Hosted
from lightning_agentrl.episodes.recipe import Recipe
from lightning_agentrl.episodes.wording import Wording
from lightning_agentrl.errors.problem import ConfigError

Place = Literal["thread", "process"]


def make_worker(
    recipe: Recipe,
    executor: Executor | None = None,
    place: Place | None = None,
    timeout: float | None = None,
    retries: int = 0,
    wording: Wording | None = None,
) -> EnvWorker:
    """Make an environment where it is to run.

    Args:
        recipe: of the environment.
        executor: runs its calls where it is in a thread; None: they run in the caller's.
        place: where it is to run; None: where it declares, else in a thread.
        timeout: most seconds of a call (``timeout_seconds``), which needs a process; None: no limit.
        retries: how often a call may fail.
        wording: what the config changes in its words.

    Raises:
        ConfigError: it cannot be made, or cannot run there; with the key to change.
    """
    where = _where(recipe, place)
    make: Callable[[], Hosted] = partial(_made_here, recipe)
    if where == "process":
        make = partial(ProcessEnvironment, recipe, timeout)
    elif timeout is not None:
        raise ConfigError(no_timeout(timeout, recipe.key))
    return EnvWorker(
        make, None if where == "inline" else executor, retries, wording, f"{recipe.key}.wording", recipe.id
    )


def _where(recipe: Recipe, asked: Place | None) -> str:
    """Return thread, process or inline: what is asked, else what the environment declares.

    Raises:
        ConfigError: a thread is asked for, and the environment needs a process.
    """
    if asked == "process":
        return asked
    declared = checked_worker(getattr(recipe.load(), "worker", None))
    if declared == "process" and asked == "thread":
        raise ConfigError(
            f"the environment '{recipe.id}' needs a process of its own (its attribute `worker`); remove the key "
            f"{recipe.key}.worker or set it to process"
        )
    return asked or declared or "thread"


def _made_here(recipe: Recipe) -> Environment:
    environment = Environment(recipe.make)
    if environment.contract.worker == "process":
        environment.close()
        raise ConfigError(
            f"the environment '{recipe.id}' needs a process of its own, but says so (attribute `worker`) only once "
            f"it is made; declare it on the class that is registered, or set {recipe.key}.worker to process"
        )
    return environment


def no_timeout(seconds: float, key: str) -> str:
    """Return a sentence about a timeout that is given to an environment in a thread."""
    return (
        f"{key}.timeout_seconds {seconds:g} needs a process, since a thread cannot be ended; set {key}.worker to "
        "process, or remove timeout_seconds"
    )
