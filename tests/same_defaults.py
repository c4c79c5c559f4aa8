"""A strategy object and the pure function that it calls are documented with the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def assert_same_defaults(function: Callable[..., Any], cls: type) -> None:
    """Of the arguments that both have."""
    of_function, of_class = (
        {name: given.default for name, given in inspect.signature(one).parameters.items()} for one in (function, cls)
    )
    shared = of_function.keys() & of_class.keys()
    assert shared
    assert {name: of_function[name] for name in shared} == {name: of_class[name] for name in shared}
