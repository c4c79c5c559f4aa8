"""Analysis of replies that name no action: reasons, texts, and aliases that would make them valid."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

ALIAS_WORDS = 6  # largest number of words in a suggested alias, and in a text that counts as an action's name
CLOSE = 0.75  # similarity from which a text counts as a misspelled action
# The parser reads this as the key before an action, not as part of the action's name.
_KEY = re.compile(r"\W*actions?\b")
_NOT = re.compile(r"\b(?:not|never|no|don't|cannot|can't|won't|avoid)\b")


class Invalid(StrEnum):
    """Reason why a reply is invalid."""

    EMPTY = "nothing at all"
    CUT = "cut by the cap on its tokens before it named an action"
    SEVERAL = "more than one action"
    SPELLED = "an action in other words"
    INVENTED = "an action that does not exist"
    TALK = "words that name no action"
    REFUSED = "an action that the environment refused"


@dataclass(frozen=True)
class InvalidReplies:
    """Counts of invalid replies by kind and by text, most frequent first."""

    kinds: Mapping[Invalid, int]
    texts: Mapping[str, int]  # texts in place of a valid action
    invented: Mapping[str, int]  # texts that are names of actions that do not exist
    aliases: Mapping[str, tuple[str, int]]  # suggested aliases: text -> (action, count)


def invalid_replies(replies: Sequence[tuple[str, bool, bool, Mapping[str, str]]]) -> InvalidReplies:
    """Classify and count invalid replies.

    Args:
        replies: for each reply, the text that should name the action, without formatting; whether this text names an
            action; whether the reply was cut; and the actions by their spellings, without formatting.
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
        suggested.setdefault(alias, (action, count))  # keep the most frequent action, since actions differ by episode
    return InvalidReplies(dict(kinds.most_common()), dict(texts.most_common()), dict(invented.most_common()), suggested)


def judge(said: str, cut: bool, actions: Mapping[str, str]) -> tuple[Invalid, str, str]:
    """Return why a reply names no action, and a suggested alias with its action, or empty strings.

    An alias is suggested if exactly one action occurs after other words, or if a short text is close to an action's
    spelling, unless the text begins with the word "action". The alias includes all words up to the end of the action,
    since the parser accepts replies that begin with an alias.
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
        if alias in actions:  # the parser did not accept the alias, so the reply also names something else
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
