"""Error messages in parts: what was given, the key to change with file and line, and what is accepted."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MOST_LISTED = 8  # largest number of names that a sentence lists in addition to a suggestion
_KEY = re.compile(r"\b(?:(?:model|data|trainer)\.\w[\w.\[\]]*|ckpt_path\b|seed_everything\b)")


@dataclass(frozen=True)
class Problem:
    """The parts of an error message. If a message has no parts, `what` holds the whole message.

    Args:
        what: description of the fault, with the given value.
        key: dotted key to change.
        missing: whether the key is absent; its place is then the place of the section above.
        suggestion: name that was probably meant.
        fix: advice for the user.
        known: accepted names.
        place: file and line, or the command line, if known without a search for the key.
    """

    what: str
    key: str = ""
    missing: bool = False
    suggestion: str = ""
    fix: str = ""
    known: tuple[str, ...] = ()
    place: str = ""

    @property
    def keys(self) -> list[str]:
        """The keys to look up: `key`, or the keys that the text names."""
        named = [self.key] if self.key else _KEY.findall(self.what) or _KEY.findall(self.fix)
        return list(dict.fromkeys(key.rstrip(".") for key in named))

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self, places: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
        """Return everything in one sentence.

        Args:
            places: files and lines in which the keys were given.
            notes: further facts, each in parentheses at the end.
        """
        brackets = [f"key {self.key}"] if self.key and self.key not in self.what else []
        brackets += [self.place] if self.place else places
        text = self.what + (f" ({'; '.join(brackets)})" if brackets else "")
        if self.fix and not self.suggestion:
            text += f"; {self.fix}"
        if self.known and (not self.suggestion or len(self.known) <= _MOST_LISTED):
            text += f"; known: {', '.join(self.known)}"
        if self.suggestion:
            text += f"; did you mean {self.suggestion}?"
        return text + "".join(f" ({note})" for note in notes)


class ConfigError(ValueError):
    """Invalid input. The message is one sentence for the user."""

    def __init__(self, problem: Problem | str) -> None:
        self.problem = Problem(problem) if isinstance(problem, str) else problem
        super().__init__(str(self.problem))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__


def closest(word: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """Return the known name closest to a word, or an empty string if no name is close.

    Args:
        word: word to look up, in any case.
        known: accepted names.
        cutoff: smallest similarity, from 0 to 1.
    """
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else ""


def one_line(text: str) -> str:
    return " ".join(text.split())


def first_line(error: BaseException) -> str:
    """Return the first nonempty line of an error's message, or the name of its class."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
