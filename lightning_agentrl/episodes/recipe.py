"""How an environment is made, in any process: its id, its arguments, and what gymnasium says of them as wrong input.

The processes of environments import this file, so it imports nothing but gymnasium and the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, load_env_creator, parse_env_id

from lightning_agentrl.episodes.argument_types import argument_problem
from lightning_agentrl.episodes.expert import ExpertActions
from lightning_agentrl.episodes.make_errors import environment_problem, import_problem
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.errors.secrets import filled, masked

ENV = "data.init_args.env"  # the key of a config for one environment


@dataclass(frozen=True)
class Recipe:
    """How an environment is made, in any process.

    Args:
        id: as ``gymnasium.make`` takes it.
        kwargs: arguments of the environment.
        key: the key of the config under which it was given.
        registered: what the id stands for, in case the other process does not know it.
        expert: add the action of the scripted player to each info.
    """

    id: str
    kwargs: Mapping[str, Any]
    key: str
    registered: EnvSpec | None = None
    expert: bool = False

    def make(self) -> gymnasium.Env:
        """Build the environment.

        Raises:
            ConfigError: gymnasium does not know the id or the arguments; with the key to change.
        """
        if problem := argument_problem(self.id, self.kwargs, self.load(), self.key):
            raise ConfigError(problem)
        with self._as_config_errors():
            env = gymnasium.make(self.id, disable_env_checker=True, **filled(self.kwargs, f"{self.key}.kwargs"))
        return ExpertActions(env, self.id) if self.expert else env

    def load(self) -> Callable[..., Any] | None:
        """Import the environment and return what makes it, a class or a function; None if gymnasium does not know it.

        Raises:
            ConfigError: it cannot be imported.
        """
        if self.registered is not None:
            gymnasium.registry.setdefault(self.registered.id, self.registered)
        self._import()
        with self._as_config_errors():
            entry = None if self.spec is None else self.spec.entry_point
            return load_env_creator(entry) if isinstance(entry, str) else entry

    def _import(self) -> None:
        """Import the module that the id names.

        Raises:
            ConfigError: it cannot be imported, with the line of it that is at fault.
        """
        if module := self.id.rpartition(":")[0]:
            try:
                import_module(module)
            except Exception as error:
                problem = import_problem(self.id, self.key)
                raise ConfigError(replace(problem, what=masked(problem.what))) from error

    @property
    def spec(self) -> EnvSpec | None:
        """What is registered in this process under the id so far."""
        with self._as_config_errors():
            namespace, name, version = parse_env_id(self.id.split(":")[-1])
            newest = find_highest_version(namespace, name) if version is None else version
            return gymnasium.registry.get(get_env_id(namespace, name, newest))

    @contextmanager
    def _as_config_errors(self) -> Iterator[None]:
        try:
            yield
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            problem = environment_problem(self.id, self.kwargs, error, self.key)
            raise ConfigError(replace(problem, what=masked(problem.what))) from error
