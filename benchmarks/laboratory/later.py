"""Settings as text, by which runs are found: a field that came after the first runs is left out where it is unset."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

LATER = {"later": True}  # metadata of fields that a setting got when there were runs


def shown(owner: Any) -> str:
    """Return a dataclass as ``Name(field=value, ...)``, without later fields that have their default."""
    named = {
        each.name: getattr(owner, each.name)
        for each in fields(owner)
        if each.metadata != LATER or getattr(owner, each.name) != each.default
    }
    return f"{type(owner).__name__}({', '.join(f'{name}={value!r}' for name, value in named.items())})"
