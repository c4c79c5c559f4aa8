"""What is wrong with an input, in parts, and its text: one sentence, or labelled lines on a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

COMMAND_LINE = "command line"
LABELS = ("where", "when", "did you mean", "fix")
_LABEL_WIDTH = 14
_SHORT_LIST = 8  # names that a sentence lists although it suggests one of them
_KEY = re.compile(r"\b(?:(?:model|data|trainer)\.\w[\w.\[\]]*|ckpt_path\b|seed_everything\b)")


@dataclass(frozen=True)
class Place:
    """A line of a file, or the command line, where something was given."""

    where: str
    key: str = ""  # the key there, with the numbers of list items


@dataclass(frozen=True)
class Problem:
    """The parts of an error message. One that comes as a sentence is all in `what`.

    Args:
        what: the fault, with the value that was given.
        key: the dotted key that is wrong.
        owner: short name of the class that the key belongs to, which tells the items of a list apart.
        value: what was given as text, which tells several files apart.
        missing: the key is not there; its place is that of the section it belongs to.
        classless: the value of the key is not a class.
        suggestion: what was probably meant.
        fix: what to do.
        known: names that are allowed.
        place: where it is, if that is known without searching for the key.
    """

    what: str
    key: str = ""
    owner: str = ""
    value: str | None = None
    missing: bool = False
    classless: bool = False
    suggestion: str = ""
    fix: str = ""
    known: tuple[str, ...] = ()
    place: Place | None = None

    @property
    def keys(self) -> list[str]:
        """The keys to look at: the one that is wrong, or those that the sentence names."""
        named = [self.key] if self.key else _KEY.findall(self.what) or _KEY.findall(self.fix)
        return list(dict.fromkeys(key.rstrip(".") for key in named))

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self, places: Sequence[Place] = (), notes: Sequence[str] = ()) -> str:
        """Return everything in one sentence."""
        brackets = []
        if self.key and self.key not in self.what:
            brackets.append(f"key {places[0].key if places and places[0].key else self.key}")
        brackets += [places[0].where] if len(places) == 1 else [f"{place.key}: {place.where}" for place in places]
        text = self.what + (f" ({'; '.join(brackets)})" if brackets else "")
        if len(places) == 1 and self.what.endswith(f"(key {places[0].key})"):
            text = f"{self.what[:-1]}; {places[0].where})"
        if self.fix and not self.suggestion:
            text += f"; {self.fix}"
        if self.known and (not self.suggestion or len(self.known) <= _SHORT_LIST):
            text += f"; known: {', '.join(self.known)}"
        if self.suggestion:
            text += f"; did you mean {self.suggestion}?"
        return text + "".join(f" ({note})" for note in notes)

    def lines(self, places: Sequence[Place] = (), notes: Sequence[str] = (), width: int = 80) -> list[str]:
        """Return the fault, and below it one labelled line for each other part."""
        what, fix = self.what, self.fix
        if not fix and not self.known and not self.suggestion:  # a sentence: what to do stands after the semicolon
            what, _, fix = self.what.partition("; ")
        if self.known:
            fix = "; ".join(filter(None, [fix, f"known: {', '.join(self.known)}"]))
        where = [f"{place.where} ({place.key})" if place.key else place.where for place in places]
        parts = zip(LABELS, (where or [self.key], notes, [self.suggestion], [fix]), strict=True)
        rows = [f"  {label:{_LABEL_WIDTH}}{text}" for label, texts in parts for text in texts if text]
        indents = ("  ", *(" " * (_LABEL_WIDTH + 2) for _ in rows))
        return [
            line
            for text, indent in zip([f"agentrl: {what}", *rows], indents, strict=True)
            for line in textwrap.wrap(
                text, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        ]


class ConfigError(ValueError):
    """Input that cannot be used; its text is one sentence for the user."""

    def __init__(self, problem: Problem | str) -> None:
        self.problem = Problem(problem) if isinstance(problem, str) else problem
        super().__init__(str(self.problem))


def one_line(text: str) -> str:
    return " ".join(text.split())


def first_line(error: BaseException) -> str:
    """Return the first line with words of what an error says; the name of its class, if it says nothing."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def in_one_line(error: BaseException) -> str:
    """Return what an error says on one line; if it says nothing, that."""
    return one_line(str(error)) or f"{type(error).__name__} without a message"
