"""Replies that the parser took no action from: what they name instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.metrics.invalid_replies import Invalid, judge
from lightning_agentrl.prompts.parser import normalise, split_reply


def invents(reply: str, cut: bool, contract: Contract) -> bool:
    """Return whether a reply without an action names one that there is not.

    Args:
        reply: the text.
        cut: whether it ended at the cap on its tokens.
        contract: what the environment offers.
    """
    names = spellings(contract)
    return bool(contract.actions) and judge(said(reply, names), cut, names)[0] is Invalid.INVENTED


def said(reply: str, names: Collection[str] = ()) -> str:
    """Return what a reply names as its action, as the parser compares it with the names of actions.

    Args:
        reply: the text.
        names: of the actions, see :func:`spellings`.
    """
    lines = (normalise(line, names) for line in split_reply(reply)[1].splitlines())
    return next(filter(None, lines), "")


def spellings(contract: Contract) -> Mapping[str, str]:
    """Return the actions of an environment by their names and aliases, as the parser compares them."""
    aliases = {normalise(alias): action for alias, action in contract.aliases.items() if action in contract.actions}
    known = aliases | {normalise(name): name for name in contract.actions}
    return {spelling: action for spelling, action in known.items() if spelling}
