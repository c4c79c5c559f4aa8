"""Mistakes in an environment of one's own: one sentence with the fix, when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest

from agentrl_envs import TextEnv
from lightning_agentrl.episodes.environment import Environment
from lightning_agentrl.episodes.observation import CONTRACT
from lightning_agentrl.episodes.sources import EnvConfig
from lightning_agentrl.errors import ConfigError, EnvError
from lightning_agentrl.errors.config_errors import import_fault


class Right(TextEnv):
    actions = {"left": "one step left", "right": ""}
    aliases = {"go left": "left"}
    default_action = "left"
    max_turns = 3

    @property
    def system_prompt(self) -> str:
        return "Walk."

    @property
    def examples(self) -> Any:
        return [("A wall.", "left"), ("A door.", "THINK: out.\nACTION: go left")]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        pass

    def _act(self, action: str) -> Any:
        return 0.0, False

    def _observe(self) -> Any:
        return "A wall.", ""


GONE = object()
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "forgotten property": ({"system_prompt": lambda self: "Walk."}, ["system_prompt", "@property"]),
    "method for examples": ({"examples": lambda self: []}, ["examples", "@property"]),
    "actions as a list": ({"actions": ["left", "right"]}, ["actions", "list", "{"]),
    "no limit": ({"max_turns": GONE}, ["max_turns = 20"]),
    "limit as text": ({"max_turns": "20"}, ["max_turns", "'20'", "whole number"]),
    "no default": ({"default_action": GONE}, ["default_action = "]),
    "no actions": ({"actions": GONE, "aliases": {}}, ["actions = {"]),
    "one text": ({"_observe": lambda self: "A wall."}, ["_observe", "str", 'return text, ""']),
    "three texts": ({"_observe": lambda self: ("A", "B", "C")}, ["_observe", "3 values", 'return text, ""']),
    "no text": ({"_observe": lambda self: (None, "")}, ["_observe", "None", "text"]),
    "reward alone": ({"_act": lambda self, action: 1.0}, ["_act", "float", "return 0.0, False"]),
    "five values": ({"_act": lambda self, action: ("", 0.0, False, False, {})}, ["_act", "5 values", "0.0, False"]),
    "values swapped": ({"_act": lambda self, action: (True, 1.0)}, ["_act", "float", "true or false", "0.0, False"]),
    "examples as texts": ({"examples": ["left", "no"]}, ["'left'", "pair"]),
    "unknown example": ({"examples": [("A wall.", "jump")]}, ["'jump'", "['left', 'right']", "aliases"]),
}


def made(changes: dict[str, Any]) -> Environment:
    body = {name: value for name, value in {**vars(Right), **changes}.items() if value is not GONE}
    kind = type("Own", (TextEnv,), body)
    return Environment(lambda: gymnasium.wrappers.OrderEnforcing(kind()))


def test_an_environment_without_mistakes_is_made_and_plays_from_its_start() -> None:
    assert made({}).reset(0).observation == "A wall."


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_when_the_environment_is_made(mistake: str) -> None:
    changes, parts = MISTAKES[mistake]
    with pytest.raises(EnvError) as error:
        made(changes)
    assert error.value.kind == "contract"  # the command answers with its sentence alone
    for part in parts:
        assert part in str(error.value)


MODULES = {
    "broken_syntax": ("x = 1\ndef f(:\n", "(broken_syntax.py, line 2)", "SyntaxError"),
    "raises_late": ("x = 1\n\nraise KeyError('boom')\n", "(raises_late.py, line 3)", "'boom'"),
    "lacks_package": ("x = 1\nimport no_such_package\n", "(lacks_package.py, line 2)", "'no_such_package'"),
}


@pytest.mark.parametrize("module", MODULES)
def test_the_module_of_an_environment_that_cannot_be_imported_is_told_with_its_line(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, place, what = MODULES[module]
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        EnvConfig(f"{module}:Game-v0").make()
    for part in (module, place, what, "data.init_args.env.id"):
        assert part in str(error.value)
    for part in (place, what):
        assert part in import_fault(module)  # of a class_path, too


def test_the_arguments_of_every_environment_of_a_class_are_looked_at_when_it_is_made():
    """Also where another one of the class was sound, as of two sources."""
    source = EnvConfig("agentrl_envs:FrozenLakeText-v0")
    Environment(source.make).close()
    source.kwargs = {"max_turns": 0}
    with pytest.raises(EnvError, match="max_turns is 0, but an episode needs at least one turn") as error:
        Environment(source.make)
    assert error.value.kind == CONTRACT
