"""Keys that a config leaves without a value although they need one: the parser takes nothing for any type."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any, get_args

from lightning_agentrl.errors.names import hints_of, import_class


def empty_keys(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of model and data that have no value and need one, and what holds where they are left out."""
    for name in ("model", "data"):
        yield from _of_class(settings.get(name), name)


def _of_class(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield those of a class with its arguments, or of a list of them."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _of_class(item, f"{key}[{index}]")
    elif isinstance(node, Mapping) and "class_path" in node:
        kind = import_class(str(node["class_path"]))
        if kind is not None:
            yield from _of_arguments(kind, node.get("init_args") or {}, f"{key}.init_args")


def _of_arguments(kind: type, arguments: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        hint, default = _argument(kind, name)
        if value is None:
            if hint is not None and default is not None and not _takes_none(hint):
                yield f"{key}.{name}", default
        elif isinstance(value, Mapping) and "class_path" not in value:
            for settings in (hint, *get_args(hint)):
                if _has_fields(settings, set(value)):
                    yield from _of_arguments(settings, value, f"{key}.{name}")
                    break
        else:
            yield from _of_class(value, f"{key}.{name}")


def _argument(kind: type, name: str) -> tuple[Any, Any]:
    """Return type and default of an argument, of whichever class it is passed on to; None where nothing is known."""
    for base in kind.__mro__:
        make = vars(base).get("__init__")
        parameter = inspect.signature(make).parameters.get(name) if make else None
        if parameter:
            return hints_of(kind).get(name), parameter.default
    return None, None


def _has_fields(hint: Any, names: set[str]) -> bool:
    return dataclasses.is_dataclass(hint) and names <= {field.name for field in dataclasses.fields(hint)}


def _takes_none(hint: Any) -> bool:
    return hint in (Any, None, NoneType, object) or NoneType in get_args(hint)
