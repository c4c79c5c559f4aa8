"""What an environment may offer besides ``reset`` and ``step``: one typed contract, read and checked in one place.

The processes of environments import this file, so it imports nothing but gymnasium, numpy and the errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import index, is_
from typing import Any, Literal, SupportsFloat, SupportsIndex

import gymnasium
import numpy as np

from lightning_agentrl.errors.faults import EnvError

CONTRACT = "contract"  # kind of an error that is wrong input where environments are checked before a run
REWARD = "reward"  # kind of an error in a number that is trained on
LARGEST_REWARD = 3.4e38  # what float32 holds
TEXTS = ("mission", "tips")  # attributes that a system text may ask for, beside the actions
INFO_TEXTS = ("long_term_text", "short_term_text", "executed_action")  # entries of info
INFO_FLAGS = ("success", "invalid_action")  # the same, None where nothing is said
# Below env/: names, and beginnings of names.
OUR_METRICS = {
    "retries": "its errors",
    "errors/": "its errors",
    "lost/": "its lost episodes",
    "judge": "what a judge gave",
}


@dataclass(frozen=True)
class Contract:
    """Optional attributes of an environment, found through wrappers too. They may differ from turn to turn.

    Args:
        actions: descriptions of the actions by name, in the order of the prompt.
        aliases: other names of actions, in lower case, and the action that each means.
        default_action: the action taken when a reply names none.
        system_prompt: rules and task.
        mission: what to do in this episode, such as ``go to the red ball``, for a system text of the config.
        tips: hints, one a line, for such a text.
        examples: worked examples, pairs of an observation and a reply.
        free_text: the whole reply is the action.
        tool_schemas: functions that a reply may call, as JSON schemas; the chat template shows them in its own form.
        observation_role: role of the messages with what follows an action, ``user`` or ``tool``. The first one of an
            episode is the user's in any case.
        one_turn: every episode has one turn, so a memory has nothing to show.
        render_mode: with ``rgb_array`` each turn is drawn.
        worker: ``process`` needs a process of its own; ``inline`` runs in the event loop of the trainer, for steps of
            microseconds; None runs anywhere. A class attribute, since it is read before anything is made.
        deterministic: equal seed and actions lead to an equal episode, so that it can be replayed after an error. False
            as a class attribute: after an error in it, and when a run is resumed, the running episode is dropped.
    """

    actions: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    default_action: str = ""
    system_prompt: str = ""
    mission: str = ""
    tips: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    free_text: bool = False
    tool_schemas: tuple[Mapping[str, Any], ...] = ()
    observation_role: Literal["user", "tool"] = "user"
    one_turn: bool = False
    render_mode: str | None = None
    worker: Literal["process", "inline"] | None = None
    deterministic: bool = True

    @property
    def places(self) -> dict[str, str]:
        """What a system text of the config may take from the environment, besides the actions."""
        return {name: getattr(self, name) for name in TEXTS}


def read_contract(env: gymnasium.Env, begun: bool, last: Contract | None = None) -> Contract:
    """Return what an environment offers now.

    Args:
        env: with its wrappers, which may have attributes too.
        begun: whether an episode has begun. Properties are read from then on, since they may depend on the episode.
        last: what it offered before, of which nothing that is the same is checked again.

    Raises:
        EnvError: one sentence about an attribute of a wrong type.
    """
    checked = vars(_NOTHING if last is None else last)
    now = dict(vars(_NOTHING))
    for name, value in _offered(env, begun):
        known = checked[name]
        if (value is known and type(value) in _UNCHANGING) or _same(value, known):
            now[name] = known
        elif name not in TEXTS or isinstance(value, str):  # else a name of an environment's own
            now[name] = _checked(name, value)
    if last is not None and all(map(is_, now.values(), checked.values())):
        return last
    contract = Contract(**now)
    if contract.actions and contract.default_action and contract.default_action not in contract.actions:
        raise contract_error(
            f"the environment's attribute `default_action` is {contract.default_action!r}, which is not one of its "
            f"actions: {', '.join(contract.actions)}"
        )
    return contract


def checked_worker(value: Any) -> Literal["process", "inline"] | None:
    """Return what an environment declares about where it runs.

    Raises:
        EnvError: it is not ``process``, ``inline`` or None.
    """
    return _checked("worker", value)


def read_metrics(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in ``info["progression"]`` and ``info["metrics"]``.

    Raises:
        EnvError: something other than numbers by name, or a name that is reserved, empty or of several lines.
    """
    numbers: dict[str, float] = {}
    for entry, needed in (("progression", "a number"), ("metrics", "a dictionary of names and numbers")):
        if entry not in info:
            continue
        given = info[entry] if entry == "metrics" else {entry: info[entry]}
        try:
            numbers |= {well_formed(str(name)): float(value) for name, value in given.items()}
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            wrong = (
                "has a whole number that no float holds" if isinstance(error, OverflowError) else f"must be {needed}"
            )
            raise contract_error(
                f"the environment reports info['{entry}'] = {in_short(info[entry])}, which {wrong}"
            ) from None
    for name in numbers:
        if not name.strip() or name.splitlines() != [name]:
            raise contract_error(
                f"the environment reports {name!r} in info['metrics']; the name of a metric is one line of text"
            )
        if ours := _our_metric(name):
            raise contract_error(
                f"the environment reports '{name}' in info['metrics'], where that is the name of {ours}; choose another"
            )
    return numbers


@lru_cache(maxsize=1024)
def _our_metric(name: str) -> str | None:
    """Return what we report under a name of ours; None if an environment may have it."""
    ours = (own for own in OUR_METRICS if name == own or (own.endswith("/") and name.startswith(own)))
    return OUR_METRICS.get(next(ours, ""))


def check_reward(whose: str, reward: float) -> None:
    """Refuse a reward that is not finite, or is not in float32.

    Args:
        whose: who gave it, as the beginning of a sentence.
        reward: the number.

    Raises:
        EnvError: of kind ``reward``.
    """
    if not abs(reward) <= LARGEST_REWARD:
        sentence = f"{whose} gave the reward {as_float(reward):g}; a reward must be finite, {LARGEST_REWARD:g} at most"
        raise EnvError(REWARD, sentence)


def as_float(number: SupportsFloat) -> float:
    """Return a number as a float; a whole number that no float holds is infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def plain_text(text: str) -> str:
    """Return the text in Python's own type. With numpy's, which ``rng.choice`` gives, no checkpoint could be read."""
    return str.__str__(text)


def plain(value: Any) -> Any:
    """Return a number or a text of numpy's in Python's own type, anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def well_formed(text: str) -> str:
    """Return the plain text with U+FFFD for each lone surrogate, which neither files nor tokenizers take."""
    text = plain_text(text)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_flag(what: str, value: Any) -> bool:
    """Return a truth value that an environment gave; 0 and 1 count too.

    Raises:
        EnvError: it is something else.
    """
    if isinstance(value, bool):  # nearly always, and a protocol takes long to ask
        return value
    if type(value).__name__ in ("bool", "bool_"):  # numpy's, in version 2 and before
        return bool(value)
    with suppress(TypeError):  # an array of numpy has the method, and raises where it is no single integer
        if isinstance(value, SupportsIndex) and index(value) in (0, 1):
            return bool(value)
    raise contract_error(f"the environment gave {what} = {in_short(value)}; it must be true or false")


def in_short(value: Any) -> str:
    """Return how a value looks in Python, in 80 characters at most, for an error."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number that is so long
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def contract_error(sentence: str) -> EnvError:
    return EnvError(CONTRACT, sentence)


def _offered(env: gymnasium.Env, begun: bool) -> list[tuple[str, Any]]:
    """Return names and values of the attributes that are there. A property that raises does not count as absent."""
    layers = list(_layers(env))
    places, made_up = _places(tuple([(type(layer), *vars(layer)) for layer in layers]), begun)
    offered = [(name, getattr(layers[place], name)) for name, place in places]
    return offered + [(name, env.get_wrapper_attr(name)) for name in made_up if env.has_wrapper_attr(name)]


@lru_cache(maxsize=1024)
def _places(layers: tuple[tuple[Any, ...], ...], begun: bool) -> tuple[list[tuple[str, int]], list[str]]:
    """Look up which layer has which attribute; nearly always it is the same as the turn before.

    Args:
        layers: class of an environment and of each wrapper, the outermost first, and names of what they have of their
            own.
        begun: whether properties count.

    Returns:
        Names and the layers that have them, and the names that no layer has, unless they are made up when asked for.
    """
    places, rest = [], []
    makes_up = any(_makes_up(kind) for kind, *_ in layers)
    for name in _FORMS:
        for place, (kind, *own) in enumerate(layers):
            attribute = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)
            of_it = name in own and not isinstance(attribute, property)
            if of_it or attribute is not _ABSENT:
                if begun or of_it or not isinstance(attribute, property | cached_property):
                    places.append((name, place))
                break
        else:
            if makes_up:
                rest.append(name)
    return places, rest


def _makes_up(kind: type) -> bool:
    """Return whether a class may have attributes that stand nowhere."""
    asks = getattr(kind, "has_wrapper_attr", None)
    plain = asks in (gymnasium.Env.has_wrapper_attr, gymnasium.Wrapper.has_wrapper_attr)
    return not plain or any(
        "__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in kind.__mro__[:-1]
    )


def _layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    yield env
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        yield env


def _checked(name: str, value: Any) -> Any:
    needed, read = _FORMS[name]
    if callable(value):
        raise contract_error(f"the environment's attribute `{name}` is a method; write @property above it")
    try:
        return read(value)
    except _OtherFormError:
        raise contract_error(
            f"the environment's attribute `{name}` is {in_short(value)}, a value of type {type(value).__name__}; it "
            f"must be {needed}"
        ) from None


class _OtherFormError(Exception):
    pass


def _need(condition: bool) -> None:
    if not condition:
        raise _OtherFormError


def _text(value: Any) -> str:
    _need(isinstance(value, str))
    return well_formed(value)


def _texts(value: Any) -> dict[str, str]:
    _need(isinstance(value, Mapping))
    return {_text(name): _text(text) for name, text in value.items()}


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    _need(isinstance(value, list | tuple))
    for pair in value:
        _need(isinstance(pair, list | tuple) and len(pair) == 2)
    return tuple((_text(observation), _text(reply)) for observation, reply in value)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    _need(isinstance(value, list | tuple))
    for tool in value:
        _need(isinstance(tool, Mapping))
        function = tool.get("function", tool)
        _need(isinstance(function, Mapping) and isinstance(function.get("name"), str))
    try:
        written = json.dumps(value, allow_nan=False, ensure_ascii=False)  # as chat templates and servers do
    except (TypeError, ValueError, RecursionError):
        raise _OtherFormError from None
    mended = well_formed(written)
    return tuple(value if mended == written else json.loads(mended))


def _role(value: Any) -> str:
    _need(isinstance(value, str) and value in ("user", "tool"))
    return plain_text(value)


def _truth(value: Any) -> bool:
    _need(type(value).__name__ in ("bool", "bool_"))  # Python's and numpy's
    return bool(value)


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _text_or_empty(value: Any) -> str:
    return "" if value is None else _text(value)


def _worker(value: Any) -> str | None:
    _need(value is None or (isinstance(value, str) and value in ("process", "inline")))
    return value


_FORMS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "actions": ("a dictionary of names and descriptions, such as {'left': 'one step left'}", _texts),
    "aliases": ("a dictionary of other names and actions, such as {'go left': 'left'}", _texts),
    "default_action": ("the name of an action", _text),
    "system_prompt": ("a text", _text),
    "mission": ("a text or None", _text_or_empty),
    "tips": ("a text or None", _text_or_empty),
    "examples": ("a list of pairs of texts, such as [('a wall on the left', 'right')]", _pairs),
    "free_text": ("true or false", _truth),
    "tool_schemas": ("a list of JSON schemas of functions, each with a name, of plain values only", _tools),
    "observation_role": ("'user' or 'tool'", _role),
    "one_turn": ("true or false", _truth),
    "render_mode": ("a text or None", _text_or_none),
    "worker": ("'process', 'inline' or None", _worker),
    "deterministic": ("true or false", _truth),
}


_NOTHING = Contract()
_ABSENT = object()
_UNCHANGING = (str, bool, type(None))


def _same(value: Any, checked: Any) -> bool:
    """Return whether an attribute is what was checked before, as far as this is told fast; other types never are."""
    kind = type(value)
    if kind is dict:
        return type(checked) is dict and value == checked and [*value] == [*checked]  # in the same order
    return value == checked if kind in _UNCHANGING else kind is tuple and not value and value == checked
