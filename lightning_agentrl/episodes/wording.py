"""Wording: texts of a config that replace those of an environment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.episodes.observation import contract_error
from lightning_agentrl.errors.problem import ConfigError, Problem, closest


@dataclass
class Wording:
    """Texts that replace those of the environment. If a key is left out, the environment's text stays.

    Args:
        system_prompt: rules and task.
        actions: names of the offered actions, in the order of the prompt, with their descriptions; null keeps the
            environment's description. The environment's other actions are not offered. If the environment names no
            actions, the actions of this argument are offered.
        aliases: further names of actions, in lower case, and the action that each name stands for.
        default_action: action that is taken if a reply names no action.
        examples: worked examples, pairs of an observation and a reply.
    """

    system_prompt: str | None = None
    actions: dict[str, str | None] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    default_action: str | None = None
    examples: list[tuple[str, str]] | None = None


def reworded(contract: Contract, wording: Wording) -> Contract:
    """Return the contract of an environment with the texts of the config.

    Raises:
        EnvError: the environment offers none of the wording's actions, or not the default action.
    """
    actions = contract.actions
    if wording.actions is not None:
        known = actions or wording.actions
        actions = {
            name: actions.get(name, "") if text is None else text
            for name, text in wording.actions.items()
            if name in known
        }
        if not actions:
            raise contract_error(f"the environment no longer offers any of the actions {_listed(wording.actions)}")
    default = contract.default_action if wording.default_action is None else wording.default_action
    if actions and default and default not in actions:
        raise contract_error(f"the default action {default!r} is not one of the offered actions: {_listed(actions)}")
    return replace(
        contract,
        actions=actions,
        aliases={**contract.aliases, **wording.aliases},
        default_action=default,
        system_prompt=contract.system_prompt if wording.system_prompt is None else wording.system_prompt,
        examples=contract.examples if wording.examples is None else tuple(wording.examples),
    )


def check_wording(contract: Contract, wording: Wording, key: str) -> None:
    """Check that a wording matches the contract of an environment in its first turn.

    Args:
        contract: contract of the environment, without the wording.
        wording: wording of the config.
        key: config key of the wording, for error messages.

    Raises:
        ConfigError: a name is not one of the environment's actions; the message names its key.
    """
    if contract.free_text and (wording.actions or wording.aliases or wording.default_action):
        raise _problem("the environment uses the whole reply as its action, so no actions can be named", key)
    if wording.actions is not None:
        if not wording.actions:
            raise _problem("it offers no action; name at least one, or remove the key", f"{key}.actions")
        if contract.actions:
            _need(wording.actions, contract.actions, f"{key}.actions")
    offered = contract.actions if wording.actions is None else wording.actions
    _need(wording.aliases.values(), offered, f"{key}.aliases")
    if wording.default_action is not None:
        _need([wording.default_action], offered, f"{key}.default_action")
    elif contract.default_action and offered and contract.default_action not in offered:
        what = f"the environment's default action {contract.default_action!r} is not one of the offered actions"
        raise _problem(f"{what}; offer it, or name another with {key}.default_action", f"{key}.actions")


def _need(given: Iterable[str], offered: Iterable[str], key: str) -> None:
    names = tuple(offered)
    for name in given:
        if name not in names:
            what = f"there is no action {name!r}" + ("" if names else "; the environment names none")
            raise ConfigError(Problem(what, key=key, suggestion=closest(name, names), known=names))


def _problem(what: str, key: str) -> ConfigError:
    return ConfigError(Problem(what, key=key))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
