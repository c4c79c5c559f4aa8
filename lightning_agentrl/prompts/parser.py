"""Action parsing: split a reply of the policy into its thought and its action."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

_LEAD = r"^[ \t>*_`\"'#\[({<+-]{0,8}(?:\d+[.)][ \t]*)?[*_`\"']{0,3}"  # decoration before a key at the start of a line
_MARKS = r"[ \t*_`\"')\]}]{0,8}"  # decoration between a key and its separator
_ACTION = re.compile(
    rf"(?<![^\W_])(?<!/)actions?{_MARKS}(?:[:：]|->|→)"  # the key and a colon, anywhere
    r"|<actions?>"
    rf"|{_LEAD}actions?{_MARKS}(?:=|[-–—](?=\s|$)|$)",  # at the start of a line: other separators, or a heading
    re.IGNORECASE | re.MULTILINE,
)
_BARE_ACTION = re.compile(rf"{_LEAD}actions?[*_]{{0,3}}[ \t]+(?:is[ \t]+)?(?!\d)", re.IGNORECASE | re.MULTILINE)
_THINK = re.compile(
    rf"<think(?:ing)?>|{_LEAD}(?:think(?:ing)?|thoughts?|reasoning){_MARKS}(?:[:：=]|->|→|[-–—](?=\s|$)|$)",
    re.IGNORECASE | re.MULTILINE,
)
_THINK_END = re.compile(r"</think(?:ing)?>", re.IGNORECASE)

_BULLET = re.compile(r"^(?:[+•‣▪]\s*|\d+[.)]\s+)")
_ALTERNATIVE = re.compile(r"[\s,]*(?:or\b|[/|])(.*)")


@dataclass(frozen=True)
class ParsedReply:
    """The thought of a reply, and its action in the environment's spelling; None if the reply names no action.

    ``action_start`` is the index of the character at which the thought ends and the text that names the action begins.
    """

    thought: str
    action: str | None
    action_start: int = 0


class ActionParser(ABC):
    """Strategy object that parses the thought and the action of a reply."""

    @abstractmethod
    def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> ParsedReply:
        """Parse one reply.

        Args:
            reply: text of the reply.
            actions: names of the allowed actions; empty if the environment accepts any text.
            aliases: other spellings of actions, each with its action; unlisted actions are ignored.
        """


class RawParser(ActionParser):
    """Parser for environments that accept any text: the stripped reply is the action. An empty reply has no action."""

    def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> ParsedReply:
        """Return the stripped reply as the action."""
        return ParsedReply("", reply.strip() or None)


class TolerantParser(ActionParser):
    """Parser that finds one of a fixed set of actions and ignores decoration of the reply.

    The parser reads the first nonempty line after the last action key (``ACTION:``, ``**Action** -``, ``<action>`` …).
    Without a key, it reads the first nonempty line of the reply after a closed ``<think>`` block. Case, punctuation,
    markdown, quotes, brackets, underscores and list bullets do not matter. The line must be an action name or an alias,
    or start with such a name. Alternatives that name different actions ("left or right") are ambiguous and give None.
    """

    def parse(self, reply: str, actions: Sequence[str], aliases: Mapping[str, str]) -> ParsedReply:
        """Parse one reply; see :meth:`ActionParser.parse`.

        Raises:
            ValueError: ``actions`` is empty.
        """
        if not actions:
            raise ValueError("TolerantParser needs action names; use RawParser if the environment accepts any text")
        thought, naming, action_start = split_reply(reply)
        lines = naming.splitlines()
        line = (next(filter(normalise, lines), "") or next(filter(str.strip, lines), "")).strip()
        if line in actions:  # try an exact match first, since names may differ only in case
            return ParsedReply(thought, line, action_start)
        # This comparison also finds names without letters.
        same = [name for name in actions if name.casefold() == line.casefold()]
        if len(same) == 1:
            return ParsedReply(thought, same[0], action_start)
        pattern, names = _names(tuple(actions), tuple(aliases.items()))
        action = _find(normalise(line, names), pattern, names)
        return ParsedReply(thought, action, action_start)


def split_reply(reply: str) -> tuple[str, str, int]:
    """Split a reply at its keys.

    Returns:
        The thought and the text that names the action, both without their keys, and the index of the character at which
        the action's text begins.
    """
    blocks = list(_THINK_END.finditer(reply))
    end_of_block = blocks[-1].end() if blocks else 0
    keys = list(_ACTION.finditer(reply, end_of_block)) or list(_BARE_ACTION.finditer(reply, end_of_block))
    start, end = (keys[-1].start(), keys[-1].end()) if keys else (len(reply), end_of_block)
    think = _THINK.search(reply, 0, start)
    if think is None:
        return "", reply[end:], end_of_block
    block_end = _THINK_END.search(reply, think.end(), start)
    if block_end is not None:
        return reply[think.end() : block_end.start()].strip(), reply[end:], block_end.end()
    thought = reply[think.end() : start]
    head, newline, tail = thought.rpartition("\n")
    if keys and newline and not re.search(r"[^\W\d_]", tail):  # the rest of the line decorates the following key
        thought = head
    return thought.lstrip(" \t\n*_`").rstrip(" \t\n*_`#[(<"), reply[end:], start


def normalise(text: str, names: Collection[str] = ()) -> str:
    """Return text without case, decoration, bullets and outer punctuation, to compare replies with names.

    Args:
        text: name, or line of a reply.
        names: normalized names of actions; a number that is an action's name is not removed as a bullet.
    """
    text = text.replace("’", "'").casefold()
    text = re.sub(r"</\w+>", " ", text)
    text = re.sub(r"[*_`#~\\\"“”«»\[\](){}<>]|(?<!\w)'|'(?!\w)", " ", text)
    text = re.sub(r"(?<=[^\W\d])-(?=[^\W\d])|(?<!\S)[-–—]+(?!\S)", " ", text)  # turn-left, bullets and dashes; not -1
    text = text.strip()
    bullet = _BULLET.match(text)
    if bullet is not None and bullet[0].strip().rstrip(".)") not in names:
        text = text[bullet.end() :]
    text = " ".join(text.split())
    return text.strip(" .,;:!?…|/")


def named(reply: str, names: Collection[str] = ()) -> str:
    """Return the normalized text that a reply names as its action, whether or not the action exists.

    Args:
        reply: text of the reply.
        names: normalized names of actions, see :func:`spellings`.
    """
    for line in split_reply(reply)[1].splitlines():
        if text := normalise(line, names):
            return text
    return ""


def spellings(actions: Collection[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the actions by their normalized names and aliases."""
    known: dict[str, str] = {}
    for text, action in [*aliases.items(), *zip(actions, actions, strict=True)]:
        if action in actions and (spelling := normalise(text)):
            known[spelling] = action
    return known


@lru_cache(maxsize=256)
def _names(
    actions: tuple[str, ...], aliases: tuple[tuple[str, str], ...]
) -> tuple[re.Pattern[str], dict[str, str | None]]:
    """Return a pattern of all normalized names and aliases, longest first, and the action that each name stands for.

    An ambiguous spelling maps to None.
    """
    names: dict[str, str | None] = {}
    for action in actions:
        key = normalise(action)
        names[key] = None if names.get(key, action) != action else action
    own = {key: action for key, action in names.items() if action is not None}
    others: dict[str, str | None] = {}
    for alias, action_name in aliases:
        action = action_name if action_name in actions else own.get(normalise(action_name), "")
        if action:
            key = normalise(alias)
            others[key] = None if others.get(key, action) != action else action
    merged = others | names
    longest_first = sorted(filter(None, merged), key=len, reverse=True)
    ends = r"(?!\w|(?<=\d)[.,]\d)"  # the text 3.5 does not name the action 3
    return re.compile(rf"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'}){ends}"), merged


def _find(line: str, pattern: re.Pattern[str], names: Mapping[str, str | None]) -> str | None:
    """Return the action of the longest name at the start of a normalized line; None if the line lists alternatives."""
    found = None
    while True:
        match = pattern.match(line)
        action = None if match is None else names[match[0]]
        if match is None or action is None or found not in (None, action):
            return None
        found, rest = action, line[match.end() :].lstrip()
        if re.match(r"not\b", rest):
            return None
        other = _ALTERNATIVE.match(rest)
        if other is None:
            return found
        line = other[1].strip()
