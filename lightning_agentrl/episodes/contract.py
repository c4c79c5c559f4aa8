"""The optional attributes of an environment, as one typed contract. Environment processes import this file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium

from lightning_agentrl.episodes.observation import contract_error, in_short, well_formed

TEXTS = ("mission", "tips")  # attributes that a system text may contain, besides the actions


@dataclass(frozen=True)
class Contract:
    """Optional attributes of an environment, looked up through wrappers. Their values may change from turn to turn.

    Args:
        actions: descriptions of the actions by name, in the order of the prompt.
        aliases: other names of actions, in lower case, and the action that each name stands for.
        default_action: action that is taken if a reply names no action.
        system_prompt: rules and task.
        mission: goal of this episode, such as ``go to the red ball``, for a system text of the config.
        tips: hints, one per line, for a system text of the config.
        examples: worked examples, pairs of an observation and a reply.
        free_text: whether the whole reply is the action.
        tool_schemas: functions that a reply may call, as JSON schemas; the chat template formats them.
        observation_role: role of the messages that follow an action, ``user`` or ``tool``; the first is ``user``.
        one_turn: whether every episode has one turn, so that a memory has nothing to show.
        render_mode: gymnasium's render mode; with ``rgb_array``, a picture of each turn is drawn.
        worker: where the environment runs: ``process`` in a separate process, ``inline`` in the trainer's event loop
            (for steps of microseconds), None anywhere. This class attribute is read before an environment is created.
        deterministic: whether equal seeds and actions lead to equal episodes, so that they can be replayed after an
            error. If False, the running episode is dropped after an error, and when a run is resumed.
        texts: further text attributes that a system text of the config contains, by name.
        text_names: names of all text attributes, set if the system text contains a name that does not exist.
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
    texts: Mapping[str, str] = field(default_factory=dict)
    text_names: tuple[str, ...] = ()

    @property
    def places(self) -> dict[str, str]:
        """The texts that a system text of the config may contain, by name, besides the actions."""
        return {**{name: getattr(self, name) for name in TEXTS}, **self.texts}


class ContractReader:
    """Reader of an environment's contract after each reset and step. It checks the contract only after a change.

    Args:
        texts: names of further attributes that a system text of the config contains.
    """

    def __init__(self, texts: Sequence[str] = ()) -> None:
        self.contract = Contract()
        self._asked = [name for name in texts if name not in (*TEXTS, "actions")]
        self._text_names: tuple[str, ...] | None = None
        self._offered: dict[str, Any] | None = None

    def read(self, env: gymnasium.Env) -> Contract:
        """Return the current contract of an environment. The outermost wrapper with an attribute takes precedence.

        Raises:
            EnvError: an attribute has a wrong type.
        """
        layers, offered = [env], {}
        while isinstance(layers[-1], gymnasium.Wrapper):
            layers.append(layers[-1].env)
        for name in _FORMS:
            value = _value(layers, name)
            # A value that is not a text is another use of the name.
            if value is not _ABSENT and (name not in TEXTS or isinstance(value, str)):
                # Copy mappings, since environments may change them in place.
                offered[name] = dict(value) if isinstance(value, Mapping) else value
        if self._asked:
            values = {name: _value(layers, name) for name in self._asked}
            offered["texts"] = {name: value for name, value in values.items() if isinstance(value, str)}
            if len(offered["texts"]) < len(values):
                self._text_names = self._text_names or tuple(sorted(_text_names(layers)))
                offered["text_names"] = self._text_names
        # Equal dictionaries may list the actions in another order.
        if offered != self._offered or [*offered.get("actions", ())] != [*self.contract.actions]:
            self.contract, self._offered = _checked(offered), deepcopy(offered)
        return self.contract


_ABSENT = object()


def _value(layers: Sequence[Any], name: str) -> Any:
    """Return an attribute from the outermost layer that has this attribute; an error of a property is raised."""
    owner = next((one for one in layers if hasattr(type(one), name) or hasattr(one, name)), None)
    return _ABSENT if owner is None else getattr(owner, name)


def _text_names(layers: Sequence[Any]) -> Iterator[str]:
    """Yield the names of the public attributes that are texts."""
    for name in {name for one in layers for name in dir(one) if not name.startswith("_")}:
        with suppress(Exception):  # an unused property may raise
            if isinstance(_value(layers, name), str):
                yield name


def _checked(offered: Mapping[str, Any]) -> Contract:
    checked = {}
    for name, value in offered.items():
        needed, read = _READ[name]
        if callable(value):
            raise contract_error(f"the environment's attribute `{name}` is a method; write @property above it")
        try:
            checked[name] = read(value)
        except (AttributeError, KeyError, TypeError, ValueError):
            found = f"{in_short(value)}, a value of type {type(value).__name__}"
            raise contract_error(f"the environment's attribute `{name}` is {found}; it must be {needed}") from None
    contract = Contract(**checked)
    default, actions = contract.default_action, contract.actions
    if actions and default and default not in actions:
        given = f"the environment's attribute `default_action` is {default!r}, which is not one of its actions"
        raise contract_error(f"{given}: {', '.join(actions)}")
    return contract


# Readers return a copy of a value, or raise one of the errors that `_checked` catches.


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return well_formed(value)


def _texts(value: Any) -> dict[str, str]:
    return {_text(name): _text(text) for name, text in value.items()}


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    for tool in value:
        _text(tool.get("function", tool)["name"])
    return tuple(json.loads(well_formed(json.dumps([*value], ensure_ascii=False))))


def _one_of(value: Any, *allowed: str | None) -> Any:
    if value not in allowed:
        raise ValueError
    return value


_FLAG = ("true or false", lambda value: bool(_one_of(type(value).__name__, "bool", "bool_") and value))
_FORMS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "actions": ("a dictionary of names and descriptions, such as {'left': 'one step left'}", _texts),
    "aliases": ("a dictionary of other names and actions, such as {'go left': 'left'}", _texts),
    "default_action": ("the name of an action", _text),
    "system_prompt": ("a text", _text),
    "mission": ("a text", _text),
    "tips": ("a text", _text),
    "examples": ("a list of pairs of texts", lambda pairs: tuple((_text(seen), _text(reply)) for seen, reply in pairs)),
    "free_text": _FLAG,
    "tool_schemas": ("a list of JSON schemas of functions, each with a name, of plain values only", _tools),
    "observation_role": ("'user' or 'tool'", lambda value: _one_of(_text(value), "user", "tool")),
    "one_turn": _FLAG,
    "render_mode": ("a text or None", lambda value: value if value is None else _text(value)),
    "worker": ("'process', 'inline' or None", lambda value: _one_of(value, "process", "inline", None)),
    "deterministic": _FLAG,
}
_READ = {**_FORMS, "texts": ("texts by name", _texts), "text_names": ("names", tuple)}
