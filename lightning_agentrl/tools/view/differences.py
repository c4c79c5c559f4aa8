"""Differences between two configs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_NOT_OF_THE_RUN = ("trainer.default_root_dir", "config")  # keys that always differ between runs


def different_keys(first: Path | None, second: Path | None) -> list[tuple[str, str, str]]:
    """Return the keys whose values differ, each with both values as text; the text of a missing value is empty.

    The list is empty if a config is None.

    Raises:
        ValueError: a file is not YAML, or contains itself by an anchor.
    """
    if first is None or second is None:
        return []
    one, other = map(_keys, (first, second))
    return [
        (key, one.get(key, ""), other.get(key, ""))
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key) and key not in _NOT_OF_THE_RUN
    ]


def _keys(path: Path) -> dict[str, str]:
    try:
        return dict(_flat(yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))))
    except yaml.YAMLError as error:
        why = f"not YAML ({' '.join(str(error).split())})"
        raise ValueError(f"'{path}' is {why}; remove it or write it again") from error
    except RecursionError:
        raise ValueError(f"'{path}' is nested too deeply; remove it or write it again") from None


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{path}[{number}]")
    elif path:
        yield path, str(value)
