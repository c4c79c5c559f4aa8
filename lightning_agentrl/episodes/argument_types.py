"""Arguments of an environment that are of another type than its author declares, found before it is made.

The processes of environments import this file, so it imports nothing but numpy, the contract and the errors.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from numbers import Integral, Number, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any

import numpy as np

from lightning_agentrl.episodes.contract import in_short
from lightning_agentrl.errors import Problem

_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {  # of a declared type, what fits, and the words for it
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str, PathLike), "a text"),
    bool: ((Integral, np.bool_), "true or false"),
    NoneType: ((), "null"),
}


def argument_problem(
    env_id: str, kwargs: Mapping[str, Any], maker: Callable[..., Any] | None, key: str
) -> Problem | None:
    """Return what is wrong with the first argument that is of no type that is declared for it; None if all may fit.

    What a declaration leaves open fits, and so do None and a value of the default's type: many write ``x: int = None``,
    or ``x: str = "4x4"`` where None says that another argument counts.

    Args:
        env_id: as given to ``gymnasium.make``.
        kwargs: the same.
        maker: the class or the function that makes the environment.
        key: the key of the config under which the environment was given.
    """
    declared = {} if maker is None else dict(_declared(maker))
    for name, value in kwargs.items():
        hint, default = declared.get(name, (Any, None))
        if value is not None and type(value) is not type(default) and (needed := _misfit(value, hint)):
            what = f"{name} of the environment '{env_id}' must be {needed}, got {in_short(value)}"
            return Problem(what, key=f"{key}.kwargs.{name}")
    return None


def _declared(maker: Callable[..., Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each argument with its declared type and default, also of those that a class passes on to its base."""
    owners = (
        [vars(base)["__init__"] for base in maker.__mro__ if "__init__" in vars(base)]
        if isinstance(maker, type)
        else [maker]
    )
    known: set[str] = set()
    for owner in owners:
        hints: dict[str, Any] = {}
        with suppress(Exception):  # names that cannot be resolved may raise anything
            hints = typing.get_type_hints(owner)
        try:
            arguments = inspect.signature(owner).parameters.values()
        except (TypeError, ValueError):  # it is not written in Python
            return
        for one in arguments:
            if one.name not in known:
                known.add(one.name)
                default = None if one.default is one.empty else one.default
                yield one.name, (hints.get(one.name, Any), default)
        if not any(one.kind is one.VAR_KEYWORD for one in arguments):
            return


def _misfit(value: Any, hint: Any) -> str:
    """Return the words for the type that is declared; empty if a value may be of it."""
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, UnionType):
        needed = [_misfit(value, one) for one in typing.get_args(hint)]
        return " or ".join(dict.fromkeys(needed)) if all(needed) else ""
    if kind is typing.Literal:  # which values there are, the environment says
        choices = typing.get_args(hint)
        return "" if any(isinstance(value, type(one)) for one in choices) else " or ".join(map(repr, choices))
    if kind in _PLAIN:
        fits, words = _PLAIN[kind]
        return "" if isinstance(value, fits) and (kind is not bool or value in (0, 1)) else words
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "names and values" if isinstance(value, Number | str) else ""
    if isinstance(kind, type) and issubclass(kind, Collection):
        return "a list" if isinstance(value, Number) else ""
    return ""
