"""Text that is not trusted: it must not pass for special tokens or role markers of the chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase

ROUNDS = 3  # of breaking what a normaliser makes of broken text; one is enough for all known ones


class Untrusted:
    """A filter for text of environments, users and earlier replies.

    A string that the tokenizer would read as a special token, or that the template writes to mark a role
    (``[/INST]``, ``<|user|>``), is broken by a space after its first character. Ids are looked at too, since a
    normaliser may turn harmless characters into such a string.

    Args:
        tokenizer: encodes the text.
        markers: role markers that are plain text.
        max_chars: longer texts are cut; set it so high that such a text is over every limit of tokens anyway.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, markers: Iterable[str] = (), max_chars: int = 1 << 20
    ) -> None:
        special = special_strings(tokenizer)
        self._start = re.compile(f"(?=(?:{_any_of({*special, *markers})}))(.)", re.DOTALL)
        # But for the one that stands for what is not in the vocabulary.
        known = [text for text in special if text != tokenizer.unk_token]
        self._any = re.compile(_any_of({*known, *markers}))
        self._special_ids = set(cast(list[int], tokenizer.convert_tokens_to_ids(known)))
        self._tokenizer = tokenizer
        self._max_chars = max_chars

    def __call__(self, text: str) -> str:
        """Return the text with nothing in it that reads as a special token or a role marker."""
        text = text[: self._max_chars]
        for _ in range(ROUNDS):
            text = self._start.sub(r"\1 ", text)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            read = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            if self._special_ids.isdisjoint(ids) and not self._any.search(read):
                return text
            text = read
        return re.sub(r"[^\w\s]", " ", text)  # words alone are no markers


def special_strings(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return strings that the tokenizer reads as one: special tokens, and added tokens that look like tags."""
    added = tokenizer.added_tokens_decoder.values()
    strings = {token.content for token in added if token.special or re.fullmatch(r"<.+>", token.content)}
    return [text for text in strings | set(tokenizer.all_special_tokens) if len(text) > 1]


def role_markers(text: str, contents: Sequence[str], special: Sequence[str]) -> set[str]:
    """Return what a template writes round messages to tell roles apart, as far as it is plain text.

    These are words in brackets of any kind (``[INST]``, ``<<SYS>>``, ``<|user|>``) and lines that end with a colon
    (``### Instruction:``, ``USER:``). Bare words (``user``) mean nothing without the special token before them.

    Args:
        text: a rendered conversation. Of what comes before its first message only the last line counts.
        contents: those of its messages.
        special: strings of special tokens, which are no plain text.
    """
    before, *glue = re.split(_any_of(contents), text)
    pieces = [
        piece
        for between in [before[before.rstrip().rfind("\n") + 1 :], *glue]
        for piece in re.split(_any_of(special), between)
    ]
    lines = [line.strip() for piece in pieces for line in piece.splitlines()]
    bracketed = {word for line in lines for word in line.split() if re.fullmatch(r"[^\w\s].*\w.*[^\w\s]", word)}
    return bracketed | {line for line in lines if line.endswith(":") and re.search(r"\w", line)}


def _any_of(strings: Iterable[str]) -> str:
    """Return a pattern for any of the strings, the longest first."""
    return "|".join(re.escape(text) for text in sorted(strings, key=len, reverse=True)) or r"(?!)"
