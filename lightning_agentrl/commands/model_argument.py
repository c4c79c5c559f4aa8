"""A model that an argument of a command names, where that of a run is named by a key of its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_agentrl.errors import ConfigError


@contextmanager
def naming_argument() -> Iterator[None]:
    """Let a sentence about a model name the argument --model in place of the key.

    Raises:
        ConfigError: the sentence of a ValueError.
    """
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error).replace("key model.init_args.model", "argument --model")) from error
