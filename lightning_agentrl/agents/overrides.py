"""Hooks of Lightning that a subclass overrides: Lightning's own do nothing, those of an agent have to run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

from lightning_agentrl.errors import ConfigError

HOOKS = (
    *("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_epoch_end", "on_save_checkpoint", "on_load_checkpoint"),
)


def check_hooks(kind: type, base: type) -> None:
    """Refuse a class whose hooks leave out those of the agent: no error would tell of rates or counts that are not set.

    Args:
        kind: class of an agent.
        base: class whose hooks have to run.

    Raises:
        ConfigError: with the class and the hook.
    """
    for own in kind.__mro__[: kind.__mro__.index(base)]:
        for name in HOOKS:
            if name in vars(own) and not _calls(vars(own)[name], name):
                raise ConfigError(
                    f"{name} of {own.__name__} does not call super().{name}, which an agent needs, unlike other "
                    "LightningModules; call it first"
                )


def _calls(method: object, name: str) -> bool:
    """Return whether the code of a method names another one; True if it has no code that can be read."""
    code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
    return code is None or any(name in part.co_names for part in _parts(code))


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _parts(inner)
