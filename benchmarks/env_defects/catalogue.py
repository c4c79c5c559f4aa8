"""What is wrong with which environment: filled by decorators on the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import gymnasium

Severity = Literal["error", "warning", "notice"]
EnvClass = TypeVar("EnvClass", bound=type[gymnasium.Env])


@dataclass(frozen=True)
class Defect:
    """One mistake.

    Args:
        id: for `gymnasium.make`, with the module before it.
        text: what is wrong, in one line.
        severity: what a checker should call it.
        about: pattern (case is ignored) that a finding which concerns the mistake matches in its name or text.
        withheld: whether it belongs to the half that is kept for the first run of a finished checker.
    """

    id: str
    text: str
    severity: Severity
    about: str
    withheld: bool


SOUND: list[str] = []
DEFECTS: list[Defect] = []


def sound(cls: EnvClass) -> EnvClass:
    """Register a class without a mistake."""
    gymnasium.register(id=f"{cls.__name__}-v0", entry_point=cls)
    SOUND.append(f"env_defects:{cls.__name__}-v0")
    return cls


def defect(name: str, severity: Severity, text: str, about: str) -> Callable[[EnvClass], EnvClass]:
    """Register a subclass of a sound class with a mistake; every second one of each sound class is withheld."""

    def register(cls: EnvClass) -> EnvClass:
        stem = f"{cls.__mro__[1].__name__}-"
        gymnasium.register(id=f"{stem}{name}-v0", entry_point=cls)
        earlier = sum(other.id.startswith(f"env_defects:{stem}") for other in DEFECTS)
        DEFECTS.append(Defect(f"env_defects:{stem}{name}-v0", text, severity, about, withheld=earlier % 2 == 1))
        return cls

    return register
