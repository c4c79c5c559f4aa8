"""Names that are known, and the one that a misspelt word is close to."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import typing
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

OWN_PACKAGES = ("lightning_agentrl", "agentrl_envs")


_NOT_FOR_CONFIGS = ("DryRun", "RunRecord")  # the command adds them itself


def closest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """The known name that a word is close to; empty if there is none."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else ""


def import_class(dotted: str) -> type | None:
    """The class of a dotted path, None if there is none."""
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(import_module(module), name, None) if module else None
    except Exception:  # noqa: BLE001 - a module may raise anything; `import_fault` tells it
        return None
    return found if isinstance(found, type) else None


def import_fault(module: str) -> str:
    """Why a module cannot be imported; empty if it can."""
    try:
        if module:
            import_module(module)
    except ModuleNotFoundError as error:
        here = Path(f"{str(error.name).split('.')[0]}.py")
        return f"no module '{error.name}'" + (
            f" (for {here} in this folder, set PYTHONPATH=.)" if here.exists() else ""
        )
    except Exception as error:  # noqa: BLE001 - a module may raise anything
        return f"importing {module} raised {type(error).__name__}: {error}"
    return ""


def keys_of(owner: type | None) -> list[str]:
    """Names of the arguments of a class, also of those that it hands on to its base."""
    return [parameter.name for parameter in _parameters(owner)]


def dataclass_of(owner: type | None, name: str) -> type | None:
    """The dataclass that an argument of a class expects."""
    hint = next((parameter.annotation for parameter in _parameters(owner) if parameter.name == name), None)
    options = [hint, *typing.get_args(hint)]
    return next((option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def _parameters(owner: type | None) -> list[Any]:
    if owner is None:
        return []
    from jsonargparse._parameter_resolvers import get_signature_parameters  # decides which keys are accepted; slow

    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter for parameter in get_signature_parameters(owner, logger=False) if parameter.kind not in kinds]


def class_names(bases: Sequence[type], everywhere: bool = False) -> list[str]:
    """Short names of the concrete classes of a kind: ours, or all that are imported."""
    names, todo = set(), list(bases)
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        own = cls.__module__.split(".")[0] in OWN_PACKAGES
        if (own or everywhere) and not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            names.add(cls.__name__)
    return sorted(names.difference(_NOT_FOR_CONFIGS))


def type_name(name: str) -> str:
    """A type as the parser writes it, in words."""
    if name.startswith("typing.Literal["):
        return f"one of {name.removeprefix('typing.Literal[').rstrip(']')}"
    short = name.rsplit(".", 1)[-1]
    plain = {"int": "a whole number", "float": "a number", "list": "a list"}
    return ({"NoneType": "null", "bool": "true or false"} | plain).get(short, short)
