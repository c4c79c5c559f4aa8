"""Texts of a game, from a file `wording.toml` beside its code."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Wording:
    """Texts of a game.

    Args:
        system_prompt: rules and task; the game fills names in braces, such as `{mission}`.
        default_action: action that is executed when a reply names no action; empty if the game chooses the action.
        actions: action name -> one-line description, in the order of the prompt.
        aliases: other name of an action -> action name. The file instead lists the other names of each action.
        texts: name of a further text -> text.
    """

    system_prompt: str
    default_action: str
    actions: Mapping[str, str]
    aliases: Mapping[str, str]
    texts: Mapping[str, str]


def read_wording(package: str) -> Wording:
    """Read `wording.toml` of a package, such as `agentrl_envs.babyai`."""
    data = tomllib.loads((resources.files(package) / "wording.toml").read_text(encoding="utf-8"))
    return Wording(
        system_prompt=data.get("system_prompt", "").strip("\n"),
        default_action=data.get("default_action", ""),
        actions=data.get("actions", {}),
        aliases={spoken: name for name, forms in data.get("aliases", {}).items() for spoken in forms},
        texts={name: text.strip("\n") for name, text in data.get("texts", {}).items()},
    )
