"""A memory of notes that the model wrote itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_agentrl.prompts.memory import Memory, PastTurn, Recollection, WindowMemory

# Each turn reads the episode again, so what was read is remembered: 400 turns are then some milliseconds.
NOTE_CHARS = 120  # of a note; a longer one is cut after a word
_NOTE = re.compile(r"^[ \t>*_`\"'#-]{0,8}note[ *_`]{0,4}:(.*)", re.IGNORECASE | re.MULTILINE)
REMEMBERED, REMEMBERED_CHARS = 1 << 14, 1 << 12  # replies, and their length: 130 megabytes of ASCII at most


class NotebookMemory(Memory):
    """Facts that the model wrote itself, above the observation, and the last turns.

    Every prompt says how to write one: a line of a reply such as ``note: the key is in the left room``, of which 120
    characters are kept. A note is used when a later reply has its words again, as a note or within other text; case
    and punctuation do not matter. Where a new one finds no place, the least used goes, of several the one that was
    longest not used. A reply that is asked for again leaves no notes, and neither does an episode.

    Args:
        notes: number of notes that are kept.
        turns: number of last turns shown as well, with their thoughts.
    """

    def __init__(self, notes: int = 8, turns: int = 1) -> None:
        for name, value, least in (("notes", notes, 1), ("turns", turns, 0)):
            if value < least:
                raise ValueError(f"NotebookMemory: {name} must be at least {least}, got {value}")
        self.notes = notes
        self.turns = turns
        self._window = WindowMemory(turns)

    @property
    def longest(self) -> None:
        """No bound: a note may be as old as the episode."""
        return None

    def recall(self, past: Sequence[PastTurn]) -> Recollection:
        """Show the notes of the whole episode and the last turns."""
        kept = kept_notes((turn.reply for turn in past), self.notes)
        how = f"end a reply with a line 'note: a fact' to add one; of more than {self.notes} the least used goes"
        lines = [f"Your notes ({how}):", *(f"- {note}" for note in kept or ("none yet",))]
        return Recollection(self._window.recall(past).turns, "\n".join(lines))

    def fullest(self, turn: PastTurn) -> list[PastTurn]:
        """Return as many turns as are shown, with a notebook full of long notes."""
        text = "what is known of this place by now " * NOTE_CHARS
        lines = [f"note: {f'{number} {text}'[:NOTE_CHARS]}" for number in range(self.notes)]
        return [replace(turn, reply="\n".join(lines))] * max(self.turns, 1)


@dataclass
class _Note:
    text: str
    words: str
    used: int  # in how many later replies
    last: int  # number of the reply in which it was written or used last


def kept_notes(replies: Iterable[str], notes: int) -> tuple[str, ...]:
    """Return the notes that are left after some replies, in the order in which they were written.

    Args:
        replies: oldest first.
        notes: how many are kept at most.
    """
    kept: list[_Note] = []
    for number, reply in enumerate(replies):
        read = _remembered if len(reply) <= REMEMBERED_CHARS else _read
        said, written = read(reply)
        for note in kept:
            if f" {note.words} " in said:
                note.used, note.last = note.used + 1, number
        for text, words in written:
            if any(note.words == words for note in kept):
                continue
            if len(kept) == notes:
                kept.remove(min(kept, key=lambda note: (note.used, note.last)))
            kept.append(_Note(text, words, used=0, last=number))
    return tuple(note.text for note in kept)


def _read(reply: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the words of a reply, with blanks round them, and its notes: text and words of each."""
    found = map(_cut, _NOTE.findall(reply))
    return f" {_words(reply)} ", tuple((text, words) for text in found if (words := _words(text)))


_remembered = lru_cache(REMEMBERED)(_read)


def _cut(text: str) -> str:
    """Return a text on one line, without marks round it, of whole words as far as one fits."""
    text = " ".join(text.split()).strip("*_` ")
    if len(text) <= NOTE_CHARS:
        return text
    whole, blank, _ = text[: NOTE_CHARS + 1].rpartition(" ")
    return whole if blank else text[:NOTE_CHARS]


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))
