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
        default_action: action that is executed when a reply names none; empty if the game decides.
        actions: action name -> one-line description, in the order of the prompt.
        aliases: other name -> action name. In the file each action has a list of its other names.
        texts: further texts by name.
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
