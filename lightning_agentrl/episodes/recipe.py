"""Recipe to create an environment in any process, with a clear error message if the creation fails.

Environment processes import this file, so it imports only gymnasium and the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, load_env_creator, parse_env_id

from lightning_agentrl.errors.config_errors import import_fault, parameters_of
from lightning_agentrl.errors.problem import ConfigError, Problem, closest, one_line
from lightning_agentrl.errors.secrets import filled, masked

ENV = "data.init_args.env"  # config key of a single environment
EXPERT_ACTION = "expert_action"  # key of info for the scripted player's next action; None after the last step
_OURS = "agentrl_envs"


@dataclass(frozen=True)
class Recipe:
    """Recipe to create an environment.

    Args:
        id: id for ``gymnasium.make``.
        kwargs: arguments of the environment.
        key: config key of the environment, for error messages.
        registered: registration of the id, for processes in which the id is not registered.
        expert: whether to add the action of the scripted player to each info.
        texts: names of attributes that the system text of the config contains.
    """

    id: str
    kwargs: Mapping[str, Any]
    key: str
    registered: EnvSpec | None = None
    expert: bool = False
    texts: tuple[str, ...] = ()

    def make(self) -> gymnasium.Env:
        """Build the environment.

        Raises:
            ConfigError: id or arguments are wrong; the message names the key to change.
        """
        self.load()
        try:
            env = gymnasium.make(self.id, disable_env_checker=True, **filled(self.kwargs, f"{self.key}.kwargs"))
        except ConfigError:
            raise
        except (gymnasium.error.Error, ModuleNotFoundError, TypeError, ValueError) as error:
            raise self._wrong(self._problem(error)) from error
        return ExpertActions(env, self.id) if self.expert else env

    def load(self) -> Callable[..., Any] | None:
        """Import the environment and return its class or function; None if the id is not registered.

        Raises:
            ConfigError: the environment cannot be imported.
        """
        if self.registered is not None:
            gymnasium.registry.setdefault(self.registered.id, self.registered)
        if fault := import_fault(self.id.rpartition(":")[0]):
            raise self._wrong(self._import_problem(fault))
        entry = None if self.spec is None else self.spec.entry_point
        try:
            return load_env_creator(entry) if isinstance(entry, str) else entry
        except ModuleNotFoundError as error:
            raise self._wrong(self._problem(error)) from error

    @property
    def spec(self) -> EnvSpec | None:
        """The registration of the id in this process; None if the id is not registered yet."""
        try:
            namespace, name, version = parse_env_id(self.id.split(":")[-1])
        except gymnasium.error.Error:  # the id is malformed, which `make` reports
            return None
        newest = find_highest_version(namespace, name) if version is None else version
        return gymnasium.registry.get(get_env_id(namespace, name, newest))

    def _wrong(self, problem: Problem) -> ConfigError:
        return ConfigError(replace(problem, what=masked(problem.what)))

    def _import_problem(self, fault: str) -> Problem:
        form = "an id is module:Name-v0, with a module that can be imported in the folder from which agentrl runs"
        return Problem(
            f"the environment '{self.id}' cannot be created: {fault}",
            key=f"{self.key}.id",
            fix=form if fault.startswith("no module") else "",
        )

    def _problem(self, error: Exception) -> Problem:
        """Describe the error that gymnasium or the environment raised, with the wrong id or argument."""
        module, _, name = self.id.rpartition(":")
        if isinstance(error, gymnasium.error.UnregisteredEnv):
            known = _ids_in(module)
            suggestion = _close_id(name, module, known)
            what = f"there is no environment '{self.id}'"
            return Problem(what, key=f"{self.key}.id", suggestion=suggestion, known=known)
        if isinstance(error, ModuleNotFoundError):
            return self._import_problem(one_line(str(error)))
        maker = self.load()
        names = tuple(parameters_of(maker)) if isinstance(maker, type) else ()
        unknown = [argument for argument in self.kwargs if argument not in names]
        if isinstance(error, TypeError) and names and unknown:
            return Problem(
                f"the environment '{self.id}' has no argument '{unknown[0]}'",
                key=f"{self.key}.kwargs.{unknown[0]}",
                suggestion=closest(unknown[0], names),
                known=names,
            )
        return Problem(
            f"the environment '{self.id}' with arguments {dict(self.kwargs)} cannot be created: {one_line(str(error))}",
            key=f"{self.key}.kwargs" if self.kwargs else f"{self.key}.id",
        )


def _ids_in(module: str) -> tuple[str, ...]:
    """Return the ids that a module has registered, in the form ``module:Name-v0``."""
    entries = {name: str(spec.entry_point) for name, spec in gymnasium.registry.items()}
    return tuple(f"{module}:{name}" for name, entry in entries.items() if module and entry.startswith(f"{module}."))


def _close_id(name: str, module: str, known: tuple[str, ...]) -> str:
    """Return the registered id closest to a wrong one, or an empty string.

    The search includes the package's environments without their module, and ids with a dot instead of the colon.
    """
    if known:
        return closest(f"{module}:{name}", known)
    package, dot, last = name.rpartition(".")
    if not module and dot and not import_fault(package):  # the id has a dot instead of the colon
        return closest(f"{package}:{last}", _ids_in(package)) or f"{package}:{last}"
    if not module and find_spec(_OURS) and not import_fault(_OURS):
        return closest(f"{_OURS}:{name}", _ids_in(_OURS), cutoff=0.85)
    return ""


class ExpertActions(gymnasium.Wrapper):
    """Add the next action of the environment's ``solver`` to each info.

    ``solver()`` is called after each reset. It returns a function that returns the name of the next action, or None if
    there is no scripted player.

    Args:
        env: environment to wrap.
        name: id of the environment, for error messages.
    """

    def __init__(self, env: gymnasium.Env, name: str) -> None:
        super().__init__(env)
        self.name = name
        self._player: Callable[[], Any] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        solver = self.env.get_wrapper_attr("solver") if self.env.has_wrapper_attr("solver") else lambda: None
        self._player = self._ask(solver, seed)
        if self._player is None:
            raise ConfigError(
                f"the environment '{self.name}' has no scripted player (a method `solver` that returns a function, "
                "which returns the next action); name another environment, or clone recorded runs"
            )
        self._seed = seed
        return observation, {**info, EXPERT_ACTION: self._action()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        over = bool(terminated) or bool(truncated)
        return observation, reward, terminated, truncated, {**info, EXPERT_ACTION: None if over else self._action()}

    def _action(self) -> str:
        assert self._player is not None
        action = self._ask(self._player, self._seed)
        if not isinstance(action, str):
            raise ConfigError(
                f"the scripted player of '{self.name}' returned {action!r} in the episode with seed {self._seed}; it "
                "must return an action as text"
            )
        return action

    def _ask(self, call: Callable[[], Any], seed: int | None) -> Any:
        try:
            return call()
        except Exception as error:
            raise ConfigError(
                f"the scripted player of '{self.name}' failed in the episode with seed {seed}: "
                f"{type(error).__name__}: {error}; it must work in any state, or clone recorded runs instead"
            ) from error
