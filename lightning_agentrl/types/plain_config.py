"""Objects from the plain data that a config would hold for them, and back; what a module was made with.

Plain data is what YAML holds: ``{"class_path": ..., "init_args": ...}`` for a class, a dictionary of keys for a
dataclass.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar, cast, get_args

from lightning_agentrl.errors import ConfigError, causes, explain, in_one_line
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


T = TypeVar("T")


class NotPlainError(Exception):
    """Something that plain data cannot stand for."""


def from_plain(value: T, kind: Any, key: str) -> T:
    """Return the object that plain data stands for; an object of this kind is returned as it is.

    Args:
        value: an object, or what a config would hold for it.
        kind: type of the object.
        key: where a config would hold it.

    Raises:
        ConfigError: what a config with it would be refused for.
    """
    if value is None or isinstance(value, kind) or (isinstance(value, int) and issubclass(float, kind)):
        return value
    if not isinstance(value, Mapping | str) or (isinstance(value, str) and is_dataclass(kind)):
        raise ConfigError(f"{key} takes {_wanted(kind)}, got {_shown(value)}")
    from jsonargparse import ArgumentError, ArgumentParser  # slow

    refused: list[ValueError] = []

    def make(class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Make an object, and keep its own words if it cannot be made: the parser would put many around them."""
        try:
            return class_type(*args, **kwargs)
        except ValueError as error:
            refused.append(error)
            raise ValueError(class_type.__name__) from error

    parser = ArgumentParser(exit_on_error=False)
    parser.add_instantiator(make, object)
    parser.add_argument(f"--{key}", type=kind | None if isinstance(kind, type) else kind)
    try:
        settings = parser.parse_object(_below(key, dict(value) if isinstance(value, Mapping) else value))
    except ArgumentError as error:
        inside = next((cause for cause in causes(error) if isinstance(cause, ConfigError)), None)
        raise ConfigError(inside.problem if inside else explain(str(error), error)) from error
    try:
        return cast(T, parser.instantiate(settings)[key])
    except ValueError:
        if not refused:
            raise
        own = refused[0]  # the innermost
        raise ConfigError(own.problem if isinstance(own, ConfigError) else in_one_line(own)) from own


def _wanted(kind: Any) -> str:
    if is_dataclass(kind):
        return f"keys, as {{'{names_of(cast(type, kind))[0]}': ...}}"
    names = " or ".join(one.__name__ for one in get_args(kind) or (kind,))
    return f"an object of {names}, or what a config would say"


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself; make an object of it, {value.__name__}(...)"
    if isinstance(value, bool | int | float | str | list | tuple | Mapping):
        return f"'{value}'" if isinstance(value, str) else reprlib.repr(value)
    return f"an object of {type(value).__name__}"


def items_from_plain(values: list[T] | None, kind: Any, key: str) -> list[T] | None:
    """Do as :func:`from_plain` with each item of a list.

    Raises:
        ConfigError: what a config with it would be refused for.
    """
    if values is not None and not isinstance(values, list | tuple):
        raise ConfigError(f"{key} takes a list, got {_shown(values)}")
    return None if values is None else [from_plain(value, kind, key) for value in values]


def to_plain(value: Any) -> Any:
    """Return the plain data that stands for a value. Objects hold their arguments under the same names.

    Raises:
        NotPlainError: an object does not hold an argument, or is made of something else than arguments.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [to_plain(item) for item in value]
    kind = type(value)
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value) if field.init}
    importable = kind.__module__ != "builtins" and "<locals>" not in kind.__qualname__
    if not importable or not all(hasattr(value, name) for name in names_of(kind)):
        raise NotPlainError(kind.__name__)
    given = {name: to_plain(getattr(value, name)) for name in names_of(kind)}
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": given}


class _Module(Protocol):
    @property
    def hparams(self) -> Any: ...


def keep_arguments(module: _Module) -> list[str]:
    """Keep what a Lightning module was called with as its hyper-parameters, as plain data. To be called in __init__.

    Returns:
        Names of arguments that have no plain form.
    """
    given, undescribed = dict[str, Any](), list[str]()
    for name, value in _called_with(module, inspect.currentframe()):
        try:
            given[name] = to_plain(value)
        except NotPlainError:
            undescribed.append(name)
    module.hparams.update(given)
    return undescribed


def _called_with(module: object, frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the outermost constructor of an object that is being made, by name."""
    outermost = None
    while (frame := frame and frame.f_back) is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is module:
            outermost = frame
    assert outermost is not None
    names, rest, keywords, values = inspect.getargvalues(outermost)
    yield from ((name, values[name]) for name in names if name != "self")
    if rest is not None:
        passed_on = [name for name in _positional(type(module)) if name not in names]
        yield from zip(passed_on, values[rest], strict=False)
    yield from values[keywords].items() if keywords is not None else ()


def _positional(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if "__init__" in vars(base):
            given = inspect.signature(vars(base)["__init__"]).parameters.values()
            yield from (p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")
            if not any(p.kind is p.VAR_POSITIONAL for p in given):
                return


def _below(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value
