"""Type checks of arguments of agents, data modules and their parts, and serialization of arguments for checkpoints.

Plain data has the form of a YAML config: ``{"class_path": ..., "init_args": ...}`` for an object, and the fields of a
dataclass.
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
    """An object does not store an argument as an attribute of the same name."""


def check_kind(value: T, kind: Any, key: str) -> T:
    """Check the type of an argument and return it unchanged.

    Args:
        value: the argument; None is accepted.
        kind: expected class, or union of classes.
        key: config key of the argument, for the error message.

    Raises:
        ConfigError: the argument has another type; the message names the expected class.
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
    """Convert a value to plain data. Arguments of objects are read from attributes of the same names.

    Args:
        value: value to convert.
        strict: whether the result must be sufficient to create the value again. False omits secrets, and arguments that
            an object does not store.

    Raises:
        NotPlainError: ``strict`` is set, and an object does not store one of its arguments.
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
    """Flatten plain data to values by dotted key; the value at an object's key is the name of its class."""
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
    """Replace objects in a module's hyperparameters by plain data, which ``load_from_checkpoint`` can read.

    Returns:
        The names of arguments that cannot be converted and are therefore removed.
    """
    hparams["_instantiator"] = "lightning.pytorch.cli.instantiate_module"  # LightningCLI sets the same value
    removed = []
    for name, value in list(hparams.items()):
        try:
            hparams[name] = to_plain(value)
        except NotPlainError:
            removed.append(name)
            del hparams[name]
    return removed
