"""Errors that constructors raise while the parser makes the objects of a config, with the class and its key."""

from __future__ import annotations

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_agentrl.errors import OWN_PACKAGES, ConfigError, Problem, in_one_line
from lightning_agentrl.errors.foreign_messages import in_tried_versions, missing_package
from lightning_agentrl.errors.names import keys_of


class ConstructorError(BaseException):
    """An error of a class's constructor, which is its cause.

    It is no ``Exception``, of which the parser keeps only the first where a key takes several types.
    """

    def __init__(self, owner: type) -> None:
        super().__init__(f"{owner.__name__} cannot be made")
        self.owner = owner


def naming_its_class(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes an object of a class, so that errors of the constructor name the class."""

    @functools.wraps(make)
    def named(class_type: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return make(class_type, *args, **kwargs)
        except (ValueError, ImportError, MisconfigurationException) as error:
            raise ConstructorError(class_type) from error

    return named


def construct(class_type: type, *args: Any, **kwargs: Any) -> Any:
    return class_type(*args, **kwargs)


def constructor_error(error: ConstructorError, config: dict[str, Any]) -> ConfigError:
    """Return the sentence of a constructor's error, with its key.

    Args:
        error: names the class.
        config: the parsed config, in which the class is looked up.
    """
    owner, cause = error.owner, cast(Exception, error.__cause__)
    keys = list(_keys_of_arguments(owner, config, ""))
    if isinstance(cause, ImportError):
        key = keys[0].removesuffix(".init_args") if keys else ""
        return ConfigError(missing_package(cause, owner.__name__, key))
    if isinstance(cause, ConfigError):
        return ConfigError(cause.problem)  # a new one, since it is raised from the error that it caused
    text = in_tried_versions(in_one_line(cause))
    if owner.__module__.split(".")[0] not in (*OWN_PACKAGES, "lightning"):
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        text += f" (raised in {Path(frame.filename).name}, line {frame.lineno})"
    if len(keys) != 1 or "init_args" in text:
        return ConfigError(text)
    named = [name for name in keys_of(owner) if re.search(rf"\b{name}\b", text)]
    return ConfigError(Problem(text, key=keys[0] + (f".{named[0]}" if len(named) == 1 else "")))


def _keys_of_arguments(owner: type, node: Any, key: str) -> Iterator[str]:
    """Yield the keys under which a config has the arguments of a class, named by its path or, as settings are, not."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _keys_of_arguments(owner, item, f"{key}[{index}]")
    elif isinstance(node, dict):
        if str(node.get("class_path", "")).rsplit(".", 1)[-1] == owner.__name__:
            yield f"{key}.init_args"
        elif dataclasses.is_dataclass(owner) and set(node) == {field.name for field in dataclasses.fields(owner)}:
            yield key
        for part, value in node.items():
            yield from _keys_of_arguments(owner, value, f"{key}.{part}" if key else part)
