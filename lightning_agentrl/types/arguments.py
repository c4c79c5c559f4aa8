"""The arguments with which an object was made, by their keys in a config."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from lightning_agentrl.errors.secrets import is_secret


def arguments(value: Any, key: str) -> dict[str, Any]:
    """Return the arguments with which an object was made by their keys in a config, as plain types.

    Objects hold them under the same names. What is no plain value, dataclass or object of a class with such arguments
    counts by its class. Secrets that an object holds, such as one that it has read from the environment, are left out.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return {key: value}
    if isinstance(value, Path):
        return {key: str(value)}
    if isinstance(value, Mapping):
        return _merged(arguments(item, f"{key}.{name}") for name, item in value.items()) or {key: {}}
    if isinstance(value, Sequence):
        return _merged(arguments(item, f"{key}[{place}]") for place, item in enumerate(value)) or {key: []}
    if is_dataclass(value):
        return _merged(arguments(getattr(value, field.name), f"{key}.{field.name}") for field in fields(value))
    held = {name: getattr(value, name) for name in names_of(type(value)) if hasattr(value, name)}
    given = {name: item for name, item in held.items() if not (inspect.isroutine(item) or is_secret(name, item))}
    own = _merged(arguments(item, f"{key}.init_args.{name}") for name, item in given.items())
    return {key: type(value).__name__.removeprefix("FSDP")} | own  # sharding renames classes


def _merged(parts: Iterator[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


def names_of(cls: type) -> list[str]:
    """Return the names of the arguments of a class, and of those that it passes on."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            given = inspect.signature(vars(base)["__init__"]).parameters.values()
            names += [p.name for p in given if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            if not any(p.kind is p.VAR_KEYWORD for p in given):
                break
    return names
