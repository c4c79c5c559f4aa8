"""BM25: scores of how well texts match the words of a query."""

import math
import re
from collections import Counter
from collections.abc import Sequence

_FREQUENCY = 1.2  # how fast the weight of repeated words in a text falls (BM25's k1)
_LENGTH = 0.75  # how much the length of a text matters, from 0 to 1 (BM25's b)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.casefold())


def scores(query: str, texts: Sequence[str]) -> list[float]:
    """Return the score of each text for the words of a query; 0 if a text has none of the words.

    Args:
        query: words to search for, in any order; a word that occurs twice counts twice.
        texts: texts to search.
    """
    counts = [Counter(words(text)) for text in texts]
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / max(len(texts), 1) or 1.0
    found = [0.0] * len(texts)
    for word in words(query):
        having = sum(word in count for count in counts)
        rarity = math.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
        for place, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            saturation = count[word] + _FREQUENCY * (1 - _LENGTH + _LENGTH * length / mean)
            found[place] += rarity * count[word] * (_FREQUENCY + 1) / saturation
    return found
