"""Replies that name no action: what they say instead, and which aliases would make them valid."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

ALIAS_WORDS = 6  # of the longest alias that is suggested; also of the longest text that is taken for an action's name
CLOSE = 0.75  # similarity from which one spelling is taken for another
_KEY = re.compile(
    r"\W*actions?\b"
)  # which the parser takes for the key before an action, and not as a part of its name
_NOT = re.compile(r"\b(?:not|never|no|don't|cannot|can't|won't|avoid)\b")


class Invalid(StrEnum):
    """Reason why a reply is invalid."""

    EMPTY = "nothing at all"
    CUT = "cut by the cap on its tokens before it named an action"
    SEVERAL = "more than one action"
    SPELLED = "an action in other words"
    INVENTED = "an action that there is not"
    TALK = "words that name no action"
    REFUSED = "an action that the environment refused"


@dataclass(frozen=True)
class InvalidReplies:
    """Invalid replies by kind and by text, each commonest first."""

    kinds: Mapping[Invalid, int]
    texts: Mapping[str, int]  # what was said in place of a valid action
    invented: Mapping[str, int]  # of these, names of actions that there are not
    aliases: Mapping[str, tuple[str, int]]  # suggestions: what was said, the action it means, and how often


def invalid_replies(replies: Sequence[tuple[str, bool, bool, Mapping[str, str]]]) -> InvalidReplies:
    """Sort invalid replies.

    Args:
        replies: of each the text that should name its action, without decoration; whether it does name one; whether it
            was cut; and the actions by their spellings, without decoration.
    """
    kinds: Counter[Invalid] = Counter()
    texts: Counter[str] = Counter()
    invented: Counter[str] = Counter()
    aliases: Counter[tuple[str, str]] = Counter()
    for said, named, cut, actions in replies:
        kind, alias, action = (Invalid.REFUSED, "", "") if named else judge(said, cut, actions)
        kinds[kind] += 1
        if said:
            texts[said] += 1
        if kind is Invalid.INVENTED:
            invented[said] += 1
        if alias:
            aliases[alias, action] += 1
    suggested: dict[str, tuple[str, int]] = {}
    for (alias, action), count in aliases.most_common():
        suggested.setdefault(alias, (action, count))  # actions differ between episodes: the commonest meaning
    return InvalidReplies(dict(kinds.most_common()), dict(texts.most_common()), dict(invented.most_common()), suggested)


def judge(said: str, cut: bool, actions: Mapping[str, str]) -> tuple[Invalid, str, str]:
    """Return what is wrong with a reply that names no action, and an alias with its action, or empty texts.

    An alias is suggested where exactly one action is named behind other words, or where a short text is spelled nearly
    like one, but for a text that begins with the word action. It covers the words up to the action, since the parser
    takes a reply that begins with an alias.
    """
    if not said:
        return (Invalid.CUT if cut else Invalid.EMPTY), "", ""
    found = {spelling: action for spelling, action in actions.items() if re.search(_whole(spelling), said)}
    meant = set(found.values())
    short = len(said.split()) <= ALIAS_WORDS
    if len(meant) > 1:
        return Invalid.SEVERAL, "", ""
    if len(meant) == 1:
        longest = max(found, key=len)
        match = re.search(_whole(longest), said)
        assert match is not None
        alias = said[: match.end()]
        if _NOT.search(said) or len(alias.split()) > ALIAS_WORDS:
            return Invalid.TALK, "", ""
        if alias in actions:  # and yet the parser did not take it: something else is offered with it
            return Invalid.SEVERAL, "", ""
        return (Invalid.SPELLED, "", "") if _KEY.match(alias) else (Invalid.SPELLED, alias, found[longest])
    if cut:
        return Invalid.CUT, "", ""
    if not short:
        return Invalid.TALK, "", ""
    near = difflib.get_close_matches(said, list(actions), n=1, cutoff=CLOSE)
    if not near:
        return Invalid.INVENTED, "", ""
    return (Invalid.SPELLED, "", "") if _KEY.match(said) else (Invalid.SPELLED, said, actions[near[0]])


def _whole(spelling: str) -> str:
    return rf"(?<!\w){re.escape(spelling)}(?!\w)"
