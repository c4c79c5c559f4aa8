"""Secrets among the arguments of an environment: ``${NAME}`` in every record, the value only where it is made.

The processes of environments import this file, so it imports nothing but the errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from lightning_agentrl.errors.problem import ConfigError

_REFERENCE = re.compile(r"\$\{(\w+)\}")
_SECRET = re.compile(
    r"(?i)(^|[_-])(passw(or)?d|passphrase|pwd|secret|credential|authorization|(api|access|private|secret)[_-]?key|"
    r"(api|auth|access|bearer|hf|hub)[_-]?token)s?$|^(token|bearer)$"
)
_seen: dict[str, str] = {}  # values that this process has read, and their references


def check_secrets(arguments: Mapping[str, Any]) -> None:
    """Refuse a value that is written out under a name that looks like a secret, since configs and logs would hold it.

    Raises:
        ConfigError: with the name, without the value.
    """
    for name, value in arguments.items():
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, Mapping):
                check_secrets(item)
        written = any(isinstance(item, str) and item and not _REFERENCE.search(item) for item in items)
        if written and _SECRET.search(str(name)):
            raise ConfigError(
                f"the argument '{name}' of the environment looks like a secret and is written out, so config.yaml, "
                f"run.json, checkpoints and logs would hold it; put it into an environment variable and write "
                f"{name}: ${{{re.sub(r'[^A-Z0-9]', '_', str(name).upper())}}}, on a command line in single quotes"
            )


def filled(value: Any, key: str) -> Any:
    """Return arguments with the values of environment variables in place of their references.

    Args:
        value: arguments, or a value in them.
        key: the key of the config that holds it.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(value, Mapping):
        return {name: filled(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(item, key) for item in value)
    return _REFERENCE.sub(lambda match: _read(match, key), value) if isinstance(value, str) else value


def masked(text: str) -> str:
    """Return the text with references in place of the values that this process has read."""
    for secret in sorted(_seen, key=len, reverse=True):
        text = text.replace(secret, _seen[secret])
    return text


def _read(reference: re.Match[str], key: str) -> str:
    secret = os.environ.get(reference[1], "")
    if not secret:
        raise ConfigError(f"{key} refers to the environment variable {reference[1]}, which is not set")
    _seen[secret] = reference[0]
    return secret
