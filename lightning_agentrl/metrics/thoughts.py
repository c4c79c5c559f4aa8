"""Diversity of thoughts: whether a policy still thinks, or says one thing over and over, or copies what it reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

_WORD = re.compile(r"\w+")
SIZES = (1, 2, 3)  # of the n-grams of which distinct ones are counted
COPIED = 4  # words in a row that count as copied if they stand in the prompt


@dataclass(frozen=True)
class Thoughts:
    """Numbers of the thoughts of some episodes; None where nothing can be compared.

    Args:
        count: replies with a thought.
        missing: replies without one.
        distinct: by n, distinct n-grams over all n-grams of all thoughts together; falls with their number.
        within: the same for word pairs inside a thought, on average; low: a thought repeats itself.
        similarity: shared word pairs of two thoughts in a row over all of theirs, on average.
        equal: share of thoughts that are word for word those of the turn before.
        copied: share of runs of four words that stand in the prompt, too.
    """

    count: int
    missing: int
    distinct: dict[int, float]
    within: float | None
    similarity: float | None
    equal: float | None
    copied: float | None


def thoughts(episodes: Sequence[Sequence[tuple[str, str]]]) -> Thoughts | None:
    """Compare thoughts.

    Args:
        episodes: for each turn its thought, which may be empty, and its prompt.

    Returns:
        None if there is no thought at all.
    """
    pairs = [pair for episode in episodes for pair in episode]
    said = [words(thought) for thought, _ in pairs if thought]
    if not said:
        return None
    in_a_row = [
        (words(before), words(now)) for episode in episodes for (before, _), (now, _) in pairwise(episode) if now
    ]
    in_a_row = [(before, now) for before, now in in_a_row if before]
    similar = [
        len(a & b) / len(a | b) for a, b in ((set(ngrams(x, 2)), set(ngrams(y, 2))) for x, y in in_a_row) if a | b
    ]
    copied = [gram in read for thought, prompt in pairs for gram, read in _runs(words(thought), prompt)]
    inside = [len(set(grams)) / len(grams) for one in said if (grams := ngrams(one, 2))]
    return Thoughts(
        count=len(said),
        missing=len(pairs) - len(said),
        distinct={size: share for size in SIZES if (share := _distinct(said, size)) is not None},
        within=_mean(inside),
        similarity=_mean(similar),
        equal=_mean([before == now for before, now in in_a_row]),
        copied=_mean(copied),
    )


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def ngrams(said: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return all runs of ``size`` words."""
    return [tuple(said[i : i + size]) for i in range(len(said) - size + 1)]


def _distinct(said: Sequence[Sequence[str]], size: int) -> float | None:
    grams = [gram for one in said for gram in ngrams(one, size)]
    return len(set(grams)) / len(grams) if grams else None


def _runs(said: Sequence[str], prompt: str) -> list[tuple[tuple[str, ...], set[tuple[str, ...]]]]:
    grams = ngrams(said, COPIED)
    read = set(ngrams(words(prompt), COPIED)) if grams else set()
    return [(gram, read) for gram in grams]


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None
