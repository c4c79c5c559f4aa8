"""Errors that constructors raise while the config is turned into objects."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_agentrl.errors.frames import causes, frames_of, from_package
from lightning_agentrl.errors.problem import ConfigError, Problem, one_line
from lightning_agentrl.errors.words import OWN_PACKAGES, keys_of


def constructor_error(error: Exception, config: dict[str, Any]) -> ConfigError | None:
    """The sentence of what a constructor raised and the parser wrapped; None for what is no fault of the config.

    Args:
        error: what the parser raised.
        config: the parsed config, which tells the key of the class that raised.
    """
    cause = next((cause for cause in causes(error) if not from_package(cause, "jsonargparse")), error)
    if not isinstance(cause, ValueError | ImportError):
        return None
    text = one_line(str(cause))
    owner = _constructed(cause)
    key, several = _key_of(owner, config)
    if isinstance(cause, ImportError):
        return ConfigError(missing_package(cause, owner.__name__ if owner else "a class", key))
    if from_package(cause, "lightning") and not key:
        return ConfigError(f"trainer: {text}")
    if not from_package(cause, *OWN_PACKAGES, "lightning"):
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        text += f" (raised in {Path(frame.filename).name}, line {frame.lineno})"
    if "init_args" in text or several or not key:
        return ConfigError(text)
    named = [name for name in keys_of(owner) if re.search(rf"\b{name}\b", text)]
    return ConfigError(Problem(text, key=f"{key}.init_args" + (f".{named[0]}" if len(named) == 1 else "")))


def missing_package(error: ImportError, user: str, key: str = "") -> Problem:
    """A class or function that needs a package which is not installed."""
    required = re.search(r"Requirement '([^']+)' not met", str(error))
    if required is None:
        return Problem(f"{user} needs a package: {one_line(str(error))}", key=key)
    return Problem(
        f"{user} needs the package {required[1]}, which is not installed", key=key, fix=f"pip install '{required[1]}'"
    )


def _constructed(error: BaseException) -> type | None:
    """The class whose constructor raised."""
    for frame in reversed(frames_of(error)):
        if frame.f_code.co_name in ("__init__", "__post_init__") and "self" in frame.f_locals:
            return type(frame.f_locals["self"])
    return None


def _key_of(owner: type | None, config: Any) -> tuple[str, bool]:
    """The key below which a config names a class, and whether there are several; empty if there is none."""
    found = list(_keys_of_class(owner.__name__, config, "")) if owner else []
    return (found[0] if found else "", len(found) > 1)


def _keys_of_class(name: str, node: Any, key: str) -> Iterator[str]:
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _keys_of_class(name, item, f"{key}[{index}]")
    elif isinstance(node, dict):
        if str(node.get("class_path", "")).rsplit(".", 1)[-1] == name:
            yield key
        for part, value in node.items():
            yield from _keys_of_class(name, value, f"{key}.{part}" if key else part)
