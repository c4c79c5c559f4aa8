"""In which keys two configs differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

_NOT_OF_THE_RUN = ("trainer.default_root_dir", "config")  # differ between any two runs


def different_keys(first: str | None, second: str | None) -> list[tuple[str, str, str]]:
    """Return each key with its value in either config, both as text; empty where a config lacks it or is missing.

    Raises:
        ValueError: a text is not YAML.
    """
    if first is None or second is None:
        return []
    try:
        one, other = (dict(_flat(yaml.safe_load(text))) for text in (first, second))
    except yaml.YAMLError as error:
        raise ValueError(f"the config.yaml of a run is not YAML ({' '.join(str(error).split())})") from error
    return [
        (key, one.get(key, ""), other.get(key, ""))
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key) and key not in _NOT_OF_THE_RUN
    ]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{path}[{number}]")
    else:
        yield path, str(value)
