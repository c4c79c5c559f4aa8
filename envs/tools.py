"""Repeated calls of tools that may fail, and import of functions by name."""

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ToolError(RuntimeError):
    """A tool failed in all attempts."""


def tried(tool: Callable[[], T], tries: int) -> T:
    """Call a tool and return its result; try again if the tool raises an error.

    Args:
        tool: function without arguments.
        tries: largest number of attempts, 1 or more.

    Raises:
        ToolError: all attempts failed; `__cause__` holds the last error.
    """
    for number in range(1, tries + 1):
        try:
            return tool()
        except Exception as error:  # noqa: BLE001 - a user's tool may raise any error
            _log.warning("A tool failed in try %d of %d: %s: %s", number, tries, type(error).__name__, error)
            last = error
    raise ToolError(f"The tool failed {tries} times.") from last


def find_function(path: str, argument: str) -> Callable[..., Any]:
    """Import a function by its name `module:function`.

    Args:
        path: name of the function.
        argument: name of the environment's argument that holds `path`, for error messages.

    Raises:
        ValueError: there is no function with this name.
    """
    module, _, name = path.partition(":")
    if not (module and name):
        raise ValueError(f"{argument} must name a function as module:function, and {path!r} does not.")
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"{argument} names {path!r}, whose module cannot be imported: {error}.") from error
    if not callable(found):
        raise ValueError(f"{argument} names {path!r}, but {module} has no function {name}.")
    return found
