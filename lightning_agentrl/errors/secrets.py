"""Secrets of a run: records contain only ``${NAME}``, which is replaced by the secret at the time of use.

Environment processes import this file, so the file imports only the error classes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from lightning_agentrl.errors.problem import ConfigError, Problem

_REFERENCE = re.compile(r"\$\{(\w+)\}")
# Words before "key" or "token" in the names of secrets; other keys and tokens belong to tokenizers and games.
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
_seen: dict[str, str] = {}  # reference of each secret that this process has read; the key is the secret


def is_secret(name: str, value: Any) -> bool:
    """Return whether a value is a literal secret, judged by its name, or is a URL with a password."""
    if isinstance(value, str) and _PASSWORD_IN_URL.match(value):
        return True
    if not _SECRET.search(name):
        return False
    if isinstance(value, str):
        return value != "" and not _REFERENCE.search(value)
    counts = isinstance(value, bool) or name.lower().endswith("tokens")
    return isinstance(value, int | float) and not counts


def check_secrets(given: Any, key: str = "", name: str = "") -> None:
    """Refuse literal values that look like secrets, since configs and logs would contain these secrets.

    Args:
        given: value, or mapping or list of values.
        key: config key of the value.
        name: name that describes the value: the last part of the key, or an earlier part that names a secret.

    Raises:
        ConfigError: a value looks like a secret; the message contains the key but not the value.
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
            f"put it into an environment variable and write ${{{variable}}} instead, on a command line in single "
            "quotes; only arguments of environments and urls of engines allow this, other classes can read the variable"
        )
        raise ConfigError(Problem(what, key=key, fix=fix))


def filled(value: Any, key: str) -> Any:
    """Return arguments with references ``${NAME}`` replaced by the values of the environment variables.

    Args:
        value: arguments, or the value of one argument.
        key: config key of the value, for the error message.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(value, Mapping):
        return {name: filled(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(filled(item, key) for item in value)
    return _REFERENCE.sub(lambda match: _read(match, key), value) if isinstance(value, str) else value


def masked(text: str) -> str:
    """Return a text in which secrets that this process has read are replaced by their references."""
    for secret in sorted(_seen, key=len, reverse=True):
        text = text.replace(secret, _seen[secret])
    return text


def _read(reference: re.Match[str], key: str) -> str:
    secret = os.environ.get(reference[1], "")
    if not secret:
        raise ConfigError(f"{key} refers to the environment variable {reference[1]}, which is not set")
    _seen[secret] = reference[0]
    return secret
