"""Secrets of a run: ``${NAME}`` in every record, the value only at its use.

The processes of environments import this file, so it imports nothing but the errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from lightning_agentrl.errors.problem import ConfigError, Problem

_REFERENCE = re.compile(r"\$\{(\w+)\}")
# Before "key" or "token" in the names of secrets. Other keys and tokens are those of tokenizers and of games.
_OF_SECRETS = (
    "api|auth|oauth|access|bearer|private|secret|refresh|session|personal|bot|hf|hub|huggingface|openai|anthropic|"
    "azure|aws|google|gemini|mistral|cohere|groq|together|openrouter|deepseek|replicate|github|gitlab|slack|discord|"
    "telegram|wandb|comet|neptune|mlflow|serper|serpapi|tavily|brave|bing"
)
_SECRET = re.compile(
    r"(?i)(^|[_-])(passw(or)?d|passphrase|pwd|secret|credential|authorization|"
    rf"({_OF_SECRETS})[_-]?(key|token))s?$|^(token|bearer)$"
)
_PASSWORD_IN_URL = re.compile(r"(?i)[a-z][a-z0-9+.-]*://[^/?#\s:@]*:(?![^/?#\s@]*\$\{\w+\})[^/?#\s@]+@")
_seen: dict[str, str] = {}  # values that this process has read, and their references


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value is a secret that is written out: by its name, or as a URL with a password."""
    if isinstance(value, str) and _PASSWORD_IN_URL.match(value):
        return True
    if not _SECRET.search(name):
        return False
    if isinstance(value, str):
        return value != "" and not _REFERENCE.search(value)
    counts = isinstance(value, bool) or name.lower().endswith("tokens")
    return isinstance(value, int | float) and not counts


def check_secrets(given: Any, key: str = "", name: str = "") -> None:
    """Refuse a value that is written out and looks like a secret, since configs and logs would hold it.

    Args:
        given: a value, or a mapping or list of values.
        key: the key of the config that holds it.
        name: the name that says what it is: the last part of the key, or the part above it that names secrets.

    Raises:
        ConfigError: with the key, without the value.
    """
    if isinstance(given, Mapping):
        for own, item in given.items():
            inner = name if _SECRET.search(name) else str(own)
            check_secrets(item, f"{key}.{own}" if key else str(own), inner)
    elif isinstance(given, list | tuple):
        for place, item in enumerate(given):
            check_secrets(item, f"{key}[{place}]", name)
    elif is_secret(name, given):
        variable, kind = re.sub(r"[^A-Z0-9]", "_", name.upper()), "looks like a secret and is written out"
        if isinstance(given, str) and _PASSWORD_IN_URL.match(given):
            variable, kind = "PASSWORD", "has a URL with a password"
        what = f"'{key}' {kind}, so config.yaml, run.json, checkpoints and logs would hold it"
        fix = (
            f"put it into an environment variable and write ${{{variable}}} in its place, on a command line in single "
            "quotes; only arguments of environments and urls of engines take this, other classes can read the variable"
        )
        raise ConfigError(Problem(what, key=key, fix=fix))


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
