"""Names that are known, and the one that a misspelt word is close to."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import sys
import traceback
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

OWN_PACKAGES = ("lightning_agentrl", "agentrl_envs")
_NOT_FOR_CONFIGS = ("RunRecord",)  # the command adds it itself


def raised_by_us(error: BaseException) -> bool:
    """Return whether a module of ours raised an error, not another package or a user's own code."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).split(".")[0] in OWN_PACKAGES


def asked_by_others(error: BaseException) -> bool:
    """Return whether code of a user is on the way from Lightning's Trainer to an error."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = itertools.takewhile(lambda name: name != "lightning.pytorch.trainer.trainer", reversed(names))
    known = {*OWN_PACKAGES, "lightning", "lightning_utilities", "torch", *sys.stdlib_module_names}
    return any(name.split(".")[0] not in known for name in inside)


def closest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return the known name that a word is close to; empty if there is none."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else ""


def import_class(dotted: str) -> type | None:
    """Return the class of a dotted path, None if there is none."""
    module, _, name = dotted.rpartition(".")
    try:
        found = getattr(import_module(module), name, None) if module else None
    except Exception:  # noqa: BLE001 - a module may raise anything; `import_fault` reports it
        return None
    return found if isinstance(found, type) else None


def import_fault(module: str) -> str:
    """Return why a module cannot be imported; empty if it can."""
    try:
        if module:
            import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):  # one that the module itself imports
            return f"importing {module} needs the module '{error.name}', which is not installed{_line_in(error)}"
        here = Path(f"{str(error.name).split('.')[0]}.py")
        hint = f" (for {here} in this folder, set PYTHONPATH=.)" if here.exists() else ""
        return f"no module '{error.name}'{hint}"
    except Exception as error:  # noqa: BLE001 - a module may raise anything
        what = error.msg if isinstance(error, SyntaxError) else error
        return f"importing {module} raised {type(error).__name__}: {what}{_line_in(error)}"
    return ""


def module_of(error: BaseException) -> str:
    """Return the module that was being imported when an error was raised; empty if none was."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    return str(frames[0].f_globals.get("__name__", "")) if frames else ""


def _line_in(error: Exception) -> str:
    """Return the file and line in which an import failed, in brackets; empty if that is not known."""
    if isinstance(error, SyntaxError):
        return f" ({Path(error.filename).name}, line {error.lineno})" if error.filename else ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    inside = [frame for frame in frames if Path(frame.filename) != Path(__file__)]
    return f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""


def keys_of(owner: type | None) -> list[str]:
    """Return the arguments that a config may give to a class, also those that it passes on to its base."""
    if owner is None:
        return []
    from jsonargparse import ArgumentParser  # slow

    return ArgumentParser(exit_on_error=False).add_class_arguments(owner, fail_untyped=False)


def keys_inside(owner: type | None) -> dict[str, str]:
    """Return the keys of those arguments of a class that are dataclasses, each with its full name: ``lr: optim.lr``."""
    hints = hints_of(owner) if owner else {}
    return {
        field.name: f"{name}.{field.name}"
        for name, hint in hints.items()
        for kind in dataclasses_in(hint)
        for field in dataclasses.fields(kind)
    }


def hints_of(owner: type) -> dict[str, Any]:
    """Return the types of the arguments of a class by their names, also of those that it passes on."""
    found: dict[str, Any] = {}
    for base in reversed(inspect.getmro(owner)):
        with suppress(NameError, TypeError):  # hints that cannot be resolved
            found |= typing.get_type_hints(vars(base).get("__init__"))
    return found


def dataclasses_in(hint: Any) -> list[Any]:
    """Return the dataclasses that a value of this type may be."""
    return [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]


def family(kind: type) -> Iterator[type]:
    """Yield a class, and all classes that are made of it."""
    yield kind
    children: list[type] = kind.__subclasses__()
    for child in children:
        yield from family(child)


def concrete(kind: type) -> list[type]:
    """Return the classes of a kind that a config may name."""
    return [one for one in family(kind) if not inspect.isabstract(one) and not one.__name__.startswith("_")]


def class_names(bases: Sequence[type], everywhere: bool = False) -> list[str]:
    """Return the short names of the concrete classes of a kind: ours, or all that are imported."""
    found = [cls for base in bases for cls in concrete(base)]
    own = [cls for cls in found if everywhere or cls.__module__.split(".")[0] in OWN_PACKAGES]
    made = ("lightning_agentrl.commands.", "lightning_agentrl.tools.")  # a command makes them itself
    return sorted({cls.__name__ for cls in own if not cls.__module__.startswith(made)}.difference(_NOT_FOR_CONFIGS))
