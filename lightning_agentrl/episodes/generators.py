"""Random generators of an environment: find and reseed them, so that forks of an episode draw different numbers.

Environment processes import this file, so it imports only numpy.
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
# Types that are not searched, since their attributes lead to shared objects.
_CODE = (ModuleType, FunctionType, MethodType, BuiltinFunctionType)


class RandomState:
    """Reseed the random generators of an environment, and record their states to detect later draws.

    Args:
        env: unwrapped environment.
        seed: seed from which the seeds of the generators are derived.
    """

    def __init__(self, env: Any, seed: int) -> None:
        self._env = env
        own: list[Generator] = [env.np_random]
        own += [one for one in generators(env) if one is not own[0]]
        for one, child in zip(own, np.random.SeedSequence(seed).generate_state(len(own)), strict=True):
            _reseed(one, int(child))
        self._states = [(one, _state_of(one)) for one in own]
        self._global = _global_state()

    def changed(self) -> bool:
        """Return whether the environment's or the global generators drew numbers, or a new generator exists."""
        known = {id(one) for one, _ in self._states}
        return (
            self._global != _global_state()
            or any(_state_of(one) != state for one, state in self._states)
            or any(id(one) not in known for one in generators(self._env))
        )


def generators(root: object) -> list[Generator]:
    """Return the random generators that are reachable from an object through attributes and containers."""
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


def _reseed(generator: Generator, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed)


def _state_of(generator: Generator) -> bytes:
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _global_state() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state()))
