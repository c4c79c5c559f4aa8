"""Memories, which select the part of an episode's past that the next prompt shows.

Memories have no state: they get the past of the episode as an argument. So one memory serves all environments and is
not in checkpoints.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from lightning_agentrl.types.model_input import ModelInput
from lightning_agentrl.types.plain import PixelTable, SavedPixels, builtin, inputs_from_plain, inputs_to_plain

NOTE_CHARS = 120  # largest length of a note; a longer note is cut after a word
_NOTE = re.compile(r"^[ \t>*_`\"'#-]{0,8}note[ *_`]{0,4}:(.*)", re.IGNORECASE | re.MULTILINE)
# Each turn parses all notes of the episode again. With a cache, 400 turns take some milliseconds.
REMEMBERED, REMEMBERED_CHARS = 1 << 14, 1 << 12  # cached replies and their length: at most 130 MB of ASCII

OwnMessages = tuple[tuple[str, tuple[str | None, ...]], ...]
"""An environment's own messages: role and texts of each, in order; None stands for the next image."""


@dataclass(frozen=True)
class PastTurn:
    """A past turn, for later prompts."""

    observation: str  # long-term text only
    thought: str  # thought of the reply; empty if not shown
    action: str  # executed action
    reply: str = ""  # whole reply of the policy
    images: tuple[ModelInput, ...] = ()  # images of the observation, as a model reads them
    role: str = "user"  # role of the message with the observation
    messages: OwnMessages = ()  # the environment's own messages, which replace the observation's message
    follows: int = -1  # index of the past turn before this turn; -1 if this turn begins a conversation


def past_to_plain(turn: PastTurn, images: PixelTable) -> dict[str, Any]:
    """Serialize a past turn to plain types; the pixels of its images are added to the table ``images``."""
    plain = {name: builtin(value) for name, value in vars(turn).items()}
    return plain | {"images": inputs_to_plain(turn.images, images)}


def past_from_plain(plain: Mapping[str, Any], images: SavedPixels) -> PastTurn:
    """Restore a past turn from :func:`past_to_plain`."""
    return PastTurn(**{**plain, "images": inputs_from_plain(plain["images"], images)})


@dataclass(frozen=True)
class Recollection:
    """The part of the past that the next prompt shows.

    ``turns`` become pairs of user and assistant messages, oldest first; a turn with an empty thought shows only its
    action. ``note`` is text for the current user message.
    """

    turns: tuple[PastTurn, ...] = ()
    note: str = ""


class Memory(ABC):
    """Strategy object that selects the part of an episode's past that the next prompt shows."""

    # If True, an episode is one growing sample, and earlier text is never rendered again.
    grows: bool = False

    @abstractmethod
    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """Select the part to show of ``past``, the turns of the running episode, oldest first."""

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """The largest number of past turns that the memory shows; None if it may show the whole episode."""

    def fullest(self, turn: PastTurn) -> list[PastTurn]:
        """Return a past, made of copies of ``turn``, with the longest prompt; empty if prompts have no bound."""
        return [turn] * (self.longest or 0)


class WindowMemory(Memory):
    """Show the last turns of the episode.

    Args:
        turns: number of turns to show.
        thoughts: number of the newest turns that are shown with their thoughts; earlier turns show only the executed
            action. Default: ``turns``.
    """

    def __init__(self, turns: int = 1, thoughts: int | None = None) -> None:
        _at_least("WindowMemory", "turns", turns, 0)
        self.turns = turns
        self.thoughts = turns if thoughts is None else thoughts
        _at_least("WindowMemory", "thoughts", self.thoughts, 0)
        if self.thoughts > turns:
            raise ValueError(f"WindowMemory: thoughts ({thoughts}) must not exceed turns ({turns})")

    @property
    def longest(self) -> int:
        """The number of turns shown."""
        return self.turns

    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """Show the last turns, and the thoughts of the newest turns."""
        shown = _last(past, self.turns)
        silent = max(len(shown) - self.thoughts, 0)
        return Recollection((*(replace(turn, thought="") for turn in shown[:silent]), *shown[silent:]))


class ActionsOnlyMemory(Memory):
    """Show the last actions in one line of the current user message, without observations and thoughts.

    Args:
        turns: number of actions to show.
    """

    def __init__(self, turns: int) -> None:
        _at_least("ActionsOnlyMemory", "turns", turns, 1)
        self.turns = turns

    @property
    def longest(self) -> int:
        """The number of actions shown."""
        return self.turns

    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """List the last actions in a note."""
        names = ", ".join(turn.action for turn in _last(past, self.turns))
        return Recollection(note=f"Your last actions, oldest first: {names}" if names else "")


class ClearingMemory(Memory):
    """Show all turns since the last clearing of the history, which happens at intervals.

    Args:
        every: number of turns after which the history is cleared.
    """

    def __init__(self, every: int) -> None:
        _at_least("ClearingMemory", "every", every, 1)
        self.every = every

    @property
    def longest(self) -> int:
        """The largest number of turns between two clearings."""
        return self.every - 1

    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """Show the turns since the last clearing."""
        return Recollection(tuple(_last(past, len(past) % self.every)))


class FullMemory(Memory):
    """Show the whole episode. Prompts only grow, so each episode becomes one growing sample."""

    grows = True

    @property
    def longest(self) -> None:
        """Always None, since the number of shown turns has no bound."""
        return None

    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """Show every turn."""
        return Recollection(tuple(past))


class NotebookMemory(Memory):
    """Show notes that the model has written, above the observation, and the last turns.

    Every prompt explains how to write a note: a line of a reply such as ``note: the key is in the left room``, of which
    120 characters are stored. A note counts as used if a later reply repeats its words, as a note or in other text;
    case and punctuation do not matter. If the notebook is full, a new note replaces the least used note; of several
    least used notes, the note that was not used for the longest time. Replies that were not executed (``ask_again``)
    add no notes. Each episode begins without notes.

    Args:
        notes: largest number of notes.
        turns: number of last turns to show below the notes, with their thoughts.
    """

    def __init__(self, notes: int = 8, turns: int = 1) -> None:
        _at_least("NotebookMemory", "notes", notes, 1)
        _at_least("NotebookMemory", "turns", turns, 0)
        self.notes = notes
        self.turns = turns
        self._window = WindowMemory(turns)

    @property
    def longest(self) -> None:
        """Always None, since a note may be as old as the episode."""
        return None

    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """Show the notes of the whole episode and the last turns."""
        kept = kept_notes((turn.reply for turn in past), self.notes)
        how = f"end a reply with a line 'note: a fact' to add one; of more than {self.notes} the least used goes"
        lines = [f"Your notes ({how}):", *(f"- {note}" for note in kept or ("none yet",))]
        return Recollection(self._window.recall(past).turns, "\n".join(lines))

    def fullest(self, turn: PastTurn) -> list[PastTurn]:
        """Return as many past turns as prompts show, with replies that fill the notebook with long notes."""
        text = "what is known of this place by now " * NOTE_CHARS
        lines = [f"note: {f'{number} {text}'[:NOTE_CHARS]}" for number in range(self.notes)]
        return [replace(turn, reply="\n".join(lines))] * max(self.turns, 1)


@dataclass
class _Note:
    text: str
    words: str
    used: int  # number of later replies that used the note
    last: int  # index of the last reply that wrote or used the note


def kept_notes(replies: Iterable[str], notes: int) -> tuple[str, ...]:
    """Return the notes in the notebook after some replies, in the order in which they were written.

    Args:
        replies: replies of the episode, oldest first.
        notes: largest number of notes.
    """
    kept: list[_Note] = []
    for number, reply in enumerate(replies):
        read = _remembered if len(reply) <= REMEMBERED_CHARS else _read
        words_of_reply, written = read(reply)
        for note in kept:
            if f" {note.words} " in words_of_reply:
                note.used, note.last = note.used + 1, number
        for text, words in written:
            if any(note.words == words for note in kept):
                continue
            if len(kept) == notes:
                kept.remove(min(kept, key=lambda note: (note.used, note.last)))
            kept.append(_Note(text, words, used=0, last=number))
    return tuple(note.text for note in kept)


def _read(reply: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the words of a reply, surrounded by spaces, and the text and words of each of its notes."""
    found = map(_cut, _NOTE.findall(reply))
    return f" {_words(reply)} ", tuple((text, words) for text in found if (words := _words(text)))


_remembered = lru_cache(REMEMBERED)(_read)


def _cut(text: str) -> str:
    """Return a note on one line, without surrounding markdown, cut to ``NOTE_CHARS`` after a whole word if possible."""
    text = " ".join(text.split()).strip("*_` ")
    if len(text) <= NOTE_CHARS:
        return text
    whole, blank, _ = text[: NOTE_CHARS + 1].rpartition(" ")
    return whole if blank else text[:NOTE_CHARS]


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _last(past: Sequence[PastTurn], count: int) -> Sequence[PastTurn]:
    return past[max(len(past) - count, 0) :]


def _at_least(owner: str, name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{owner}: {name} must be at least {least}, got {value}")
