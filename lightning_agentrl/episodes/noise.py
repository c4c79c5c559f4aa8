"""The random numbers that an environment draws: found, and drawn anew from some moment on.

The processes of environments import this file, so it imports nothing but numpy.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

Generator = np.random.Generator | np.random.RandomState | random.Random
_PLAIN = (str, bytes, int, float, complex, bool, type(None), np.ndarray, np.generic, type)
_CODE = (ModuleType, FunctionType, MethodType, BuiltinFunctionType)  # lead to what is not the object's own


def generators(root: object) -> list[Generator]:
    """Return the generators of random numbers that an object holds, in its attributes and in what these hold."""
    found, seen, waiting = [], set[int](), [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, (*_PLAIN, *_CODE, random.SystemRandom)):
            continue
        seen.add(id(one))
        if isinstance(one, Generator):
            found.append(one)
        else:
            waiting += reversed(list(_held(one)))
    return found


def _held(one: Any) -> Iterator[Any]:
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one
    yield from getattr(one, "__dict__", {}).values()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (getattr(one, name, None) for name in ((slots,) if isinstance(slots, str) else slots))


def global_state() -> bytes:
    """Return where the generators of Python and numpy are that all share."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def reseed(generator: Generator, seed: int) -> None:
    """Let a generator, and all who hold it, draw from a seed."""
    if isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed)


def state_of(generator: Generator) -> bytes:
    """Return where a generator is; the same until it is drawn from."""
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())
