"""Help on a class of a config, wherever it stands: `agentrl fit --data.init_args.env.help`. No config is needed."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from lightning_agentrl.errors import ConfigError, Problem, closest
from lightning_agentrl.errors.names import class_names, concrete, family, hints_of, import_class
from lightning_agentrl.errors.unknown import ROOTS, unknown_class


def class_help(arguments: Sequence[str]) -> str:
    """Return the help that arguments ask for, of one class; empty if they ask for none.

    Raises:
        ConfigError: there is no such key or class, or a class has to be named.
    """
    for argument, following in pairwise((*arguments, "")):
        asked = re.fullmatch(rf"--((?:{'|'.join(ROOTS)})(?:\.\w+)*)\.help(?:=(.*))?", argument)
        if asked:
            return _help(asked[1], asked[2] or ("" if following.startswith("-") else following))
    return ""


def _help(key: str, name: str) -> str:
    root, *parts = [part for part in key.split(".") if part != "init_args" and not part.isdigit()]
    owner = import_class(ROOTS[root])
    assert owner is not None
    if root == "model" and not parts:
        kinds: list[type] = [next(base for base in owner.__mro__ if inspect.isabstract(base))]
    else:
        kinds = [owner]
    for part in parts:
        makers = [made for kind in kinds for made in concrete(kind)]
        kinds = next((found for maker in makers if (found := list(_classes(hints_of(maker).get(part))))), [])
        if not kinds:
            raise ConfigError(_no_key(key, part, makers))
    if name:
        chosen = import_class(name) or next((c for kind in kinds for c in family(kind) if c.__name__ == name), None)
        if chosen is None or not issubclass(chosen, tuple(kinds)):
            raise ConfigError(unknown_class(name, key, kinds))
    elif not parts:
        chosen = owner
    else:
        chosen = concrete(kinds[0])[0] if len(kinds) == 1 and len(concrete(kinds[0])) == 1 else None
        if chosen is None:
            known = tuple(class_names(kinds))
            raise ConfigError(Problem(f"--{key}.help needs the name of a class: --{key}.help NAME", known=known))
    return _of_class(chosen, key)


def _of_class(chosen: type, key: str) -> str:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="agentrl", usage=f"{chosen.__module__}.{chosen.__qualname__}, at the key {key}")
    plain = dataclasses.is_dataclass(chosen) or key == "trainer"
    parser.add_class_arguments(chosen, key if plain or key.endswith("init_args") else f"{key}.init_args")
    return parser.format_help()


def _no_key(key: str, part: str, owners: Sequence[type]) -> Problem:
    hints = {name: hint for owner in owners for name, hint in hints_of(owner).items()}
    names = [name for name, hint in hints.items() if any(_classes(hint))]
    what = f"there is no key '{part}' that holds a class or other keys (in --{key}.help)"
    return Problem(what, suggestion=closest(part, names), known=tuple(names))


def _classes(hint: Any) -> Iterator[type]:
    """Yield the classes that a type consists of, other than those that hold plain values."""
    if inspect.isclass(hint) and not typing.get_args(hint):
        if hint.__module__ not in ("builtins", "types", "pathlib", "collections.abc", "datetime"):
            yield hint
        return
    for part in typing.get_args(hint):
        yield from _classes(part)
