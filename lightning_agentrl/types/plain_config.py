"""Arguments of agents, data modules and their parts: their kind checked, and as plain data for checkpoints.

Plain data is what YAML holds: ``{"class_path": ..., "init_args": ...}`` for an object, its fields for a dataclass.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.errors.config_errors import parameters_of
from lightning_agentrl.errors.secrets import is_secret

T = TypeVar("T")


class NotPlainError(Exception):
    """An object does not keep an argument as an attribute of the same name."""


def check_kind(value: T, kind: Any, key: str) -> T:
    """Return an argument unchanged, and refuse one of another kind.

    Args:
        value: an object of the kind, or None.
        kind: a class, or a union of classes.
        key: the argument's key in a config.

    Raises:
        ConfigError: with the class to write.
    """
    if value is None or isinstance(value, kind):
        return value
    classes = get_args(kind) or (kind,)
    named = value.get("class_path") if isinstance(value, Mapping) else None
    name = str(named).rpartition(".")[2] if named else classes[0].__name__
    if isinstance(value, type):
        shown, name = f"the class {value.__name__}", value.__name__
    else:
        plain = isinstance(value, bool | int | float | str | Mapping | Sequence)
        shown = reprlib.repr(value) if plain else f"an object of {type(value).__name__}"
    kinds = " or ".join(one.__name__ for one in classes)
    raise ConfigError(f"{key} takes an object of {kinds}, got {shown}; write {name}(...)")


def to_plain(value: Any, strict: bool = True) -> Any:
    """Return a value as plain data. Objects hold their arguments as attributes of the same names.

    Args:
        value: what is described.
        strict: whether the value could be made again from the result. Otherwise arguments that an object does not
            hold, and secrets that it has read, are left out.

    Raises:
        NotPlainError: ``strict``, and an object does not hold one of its arguments.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): to_plain(item, strict) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [to_plain(item, strict) for item in value]
    kind = type(value)
    names = [field.name for field in fields(value) if field.init] if is_dataclass(value) else list(parameters_of(kind))
    importable = is_dataclass(value) or (kind.__module__ != "builtins" and "<locals>" not in kind.__qualname__)
    if strict and not (importable and all(hasattr(value, name) for name in names)):
        raise NotPlainError(kind.__name__)
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if not strict and not is_dataclass(value):
        held = {name: one for name, one in held.items() if not (inspect.isroutine(one) or is_secret(name, one))}
    given = {name: to_plain(item, strict) for name, item in held.items()}
    if is_dataclass(value):
        return given
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": given}


def by_key(plain: Any, key: str) -> dict[str, Any]:
    """Return plain data as values by dotted key. An object's own key has the name of its class."""
    if isinstance(plain, Mapping) and "class_path" in plain:
        name = str(plain["class_path"]).rpartition(".")[2].removeprefix("FSDP")  # sharding renames classes
        arguments: Mapping[str, Any] = plain["init_args"]
        inner = [by_key(value, f"{key}.init_args.{part}") for part, value in arguments.items()]
        return {key: name} | {part: value for one in inner for part, value in one.items()}
    if isinstance(plain, Mapping):
        inner = [by_key(value, f"{key}.{part}") for part, value in plain.items()]
    elif isinstance(plain, list):
        inner = [by_key(value, f"{key}[{place}]") for place, value in enumerate(plain)]
    else:
        return {key: plain}
    return {part: value for one in inner for part, value in one.items()} or {key: type(plain)()}


def keep_plain(hparams: Any) -> list[str]:
    """Replace objects among a module's hyperparameters by plain data, which ``load_from_checkpoint`` reads.

    Returns:
        The names of the arguments that have no such form, which are removed.
    """
    hparams["_instantiator"] = "lightning.pytorch.cli.instantiate_module"  # as for a module that LightningCLI makes
    removed = []
    for name, value in list(hparams.items()):
        try:
            hparams[name] = to_plain(value)
        except NotPlainError:
            removed.append(name)
            del hparams[name]
    return removed
