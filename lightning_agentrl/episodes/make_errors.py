"""What is wrong with an environment that gymnasium cannot make."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from lightning_agentrl.errors import Problem, closest, one_line
from lightning_agentrl.errors.names import import_fault, keys_of

_OURS = "agentrl_envs"


def import_problem(env_id: str, key: str) -> Problem:
    """Return why the module of an environment's id cannot be imported.

    Args:
        env_id: as given to `gymnasium.make`.
        key: the key of the config under which the environment was given.
    """
    fault = import_fault(env_id.rpartition(":")[0]) or "its module can be imported at a second try only"
    form = "an id is module:Name-v0, with a module that can be imported from where agentrl runs"
    return Problem(
        f"the environment '{env_id}' cannot be made: {fault}",
        key=f"{key}.id",
        fix=form if fault.startswith("no module") else "",
    )


def environment_problem(
    env_id: str, kwargs: Mapping[str, Any], error: Exception, key: str = "data.init_args.env"
) -> Problem:
    """Return what is wrong with an environment's id or arguments.

    Args:
        env_id: as given to `gymnasium.make`.
        kwargs: the same.
        error: what ``gymnasium.make`` raised.
        key: the key of the config under which the environment was given.
    """
    id_key, kwargs_key = f"{key}.id", f"{key}.kwargs"
    module, _, name = env_id.rpartition(":")
    if isinstance(error, ModuleNotFoundError) and import_fault(module):
        return import_problem(env_id, key)
    if isinstance(error, ModuleNotFoundError):  # what is registered lies in another module
        return Problem(f"the environment '{env_id}' cannot be made: {one_line(str(error))}", key=id_key)
    if isinstance(error, gymnasium.error.UnregisteredEnv):
        what, known = f"there is no environment '{env_id}'", _ids(module)
        return Problem(what, key=id_key, suggestion=_close_id(name, module, known), known=known)
    names = tuple(keys_of(_class_of(name)))
    unknown = [argument for argument in kwargs if argument not in names]
    if isinstance(error, TypeError) and names and unknown:
        return Problem(
            f"the environment '{env_id}' has no argument '{unknown[0]}'",
            key=f"{kwargs_key}.{unknown[0]}",
            suggestion=closest(unknown[0], names),
            known=names,
        )
    return Problem(
        f"the environment '{env_id}' with arguments {dict(kwargs)} cannot be made: {one_line(str(error))}",
        key=kwargs_key if kwargs else id_key,
    )


def _ids(module: str) -> tuple[str, ...]:
    """Return the ids that a module has registered, as they are written in a config."""
    entries = {name: str(spec.entry_point) for name, spec in gymnasium.registry.items()}
    return tuple(f"{module}:{name}" for name, entry in entries.items() if module and entry.startswith(f"{module}."))


def _close_id(name: str, module: str, known: tuple[str, ...]) -> str:
    """Return the id that a wrong one is close to; our own environments need their module before the name."""
    if known:
        return closest(f"{module}:{name}", known)
    package, dot, last = name.rpartition(".")
    if not module and dot and not import_fault(package):  # where the colon belongs
        return closest(f"{package}:{last}", _ids(package)) or f"{package}:{last}"
    if not module and find_spec(_OURS) and not import_fault(_OURS):
        return closest(f"{_OURS}:{name}", _ids(_OURS), cutoff=0.85)
    return ""


def _class_of(name: str) -> type | None:
    spec = gymnasium.registry.get(name)
    entry = spec.entry_point if spec else None
    found = load_env_creator(entry) if isinstance(entry, str) else entry
    return found if isinstance(found, type) else None
