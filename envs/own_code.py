"""Checks of a text environment's code when the environment is created; each error message says how to fix it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from agentrl_envs.text_env import TextEnv

_TEXT = ("a text", str)
_FORMS = {  # method -> its return value in words, an example, and the name and type of each returned value
    "_observe": ("two texts", 'return text, ""', (_TEXT, _TEXT)),
    "_caption": ("two texts", 'return text, ""', (_TEXT, _TEXT)),
    "_act": (
        "a reward and whether the episode ended",
        "return 0.0, False",
        (("a number", float | Real), ("true or false", bool | np.bool_)),
    ),
}
_SEVERAL = (tuple, list)
_tried_out: set[type] = set()
_NEEDED = {"actions": '{"left": "one step left"}', "default_action": '"left"', "max_turns": "20"}


def check_data(env: TextEnv) -> None:
    """Check that the required attributes of an environment exist and have valid types.

    Raises:
        ValueError: an attribute is missing or invalid; the message says what code to write.
    """
    owner = type(env).__name__
    for name, example in _NEEDED.items():
        declared = _declared(env, name)
        if declared is None and (name == "max_turns" or not env.free_text):
            raise ValueError(f"{owner} has no `{name}`; write `{name} = {example}` in the class")
        if declared is None or isinstance(declared, property | cached_property):
            continue  # the value of a property may depend on an episode
        if name == "max_turns" and (isinstance(declared, bool) or not isinstance(declared, Integral)):
            raise ValueError(f"{owner}: max_turns is {declared!r}; it must be a whole number, as in `max_turns = 20`")
        if name == "max_turns" and declared < 1:
            raise ValueError(f"{owner}: max_turns is {declared}, but an episode needs at least one turn.")
        if name == "actions" and not isinstance(declared, Mapping):
            names = [str(each) for each in declared] if isinstance(declared, list | tuple | set) else ["left"]
            shown = ", ".join(f'"{each}": "what it does"' for each in names)
            raise ValueError(
                f"{owner}: actions is of type {type(declared).__name__}; write names and descriptions, as in "
                f"`actions = {{{shown}}}`"
            )


def try_out(env: TextEnv) -> None:
    """Play one turn of an episode, to check the return values of an environment's methods before a run.

    Each class is checked once in a process.

    Raises:
        ValueError: a method returns a value of a wrong type, or an example names no action.
    """
    if type(env) in _tried_out:
        return
    env.reset(seed=0)
    prompt: Any = env.system_prompt
    if not isinstance(prompt, str):
        whose = f"{type(env).__name__}.system_prompt"
        raise ValueError(f"{whose} is {_kind(prompt)}; it must be a text, or a method below @property that returns one")
    check_examples(env)
    if not env.free_text:
        env.step(env.default_action)
    _tried_out.add(type(env))


def check_examples(env: TextEnv) -> None:
    """Check that worked examples are pairs of texts and name actions.

    Raises:
        ValueError: an example is invalid; the message names the first invalid example.
    """
    owner, form = type(env).__name__, 'write pairs: [("what is seen", "left")]'
    examples: Any = env.examples
    if callable(examples):
        raise ValueError(f"{owner}.examples is a method; write @property above it")
    for example in examples:
        if not isinstance(example, list | tuple) or len(example) != 2 or not all(isinstance(e, str) for e in example):
            raise ValueError(f"{owner}: the example {example!r} is not a pair of an observation and a reply; {form}")
        action = example[1].rsplit("ACTION:", 1)[-1]
        if not env.free_text and not env.resolve_action(action)[1]:
            raise ValueError(
                f"{owner}: the example {example!r} names the action {action.strip()!r}, which is not one of "
                f"{list(env.actions)}; change the example, or add the name to actions or aliases"
            )


def two_values(env: TextEnv, method: str, returned: Any) -> tuple[Any, Any]:
    """Return the two values that a method returned, after checking their types.

    Raises:
        ValueError: the method did not return two values, or their types are wrong.
    """
    words, fix, kinds = _FORMS[method]
    several = isinstance(returned, _SEVERAL)
    if several and len(returned) == 2:
        for value, (needed, kind) in zip(returned, kinds, strict=True):
            if not isinstance(value, kind):
                got = f"{_kind(value)} where {needed} belongs"
                break
        else:
            return returned[0], returned[1]
    else:
        got = f"{len(returned)} values" if several else _kind(returned)
    raise ValueError(f"{type(env).__name__}.{method} returned {got}; it must return {words}, as in `{fix}`")


def _declared(env: TextEnv, name: str) -> Any:
    """Return an attribute, or a property without its evaluation; None if there is no such attribute."""
    return next((vars(owner)[name] for owner in (env, *type(env).__mro__) if name in vars(owner)), None)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
