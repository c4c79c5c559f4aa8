"""Model inputs: a row is a sequence of chunks, each some text tokens or an image.

An image stands in the token stream as one placeholder id, repeated, which says nothing about what it shows. So ids
cannot tell whether two inputs begin alike. Prefix trees, the key/value cache and the routing to servers compare
:attr:`ModelInput.keys` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import groupby
from typing import Protocol

import numpy as np

KEY_BYTES = 16  # of an image's hash: among a billion images, two collide with a probability of 2e-21


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Token ids of text. Each is its own key, and engine and trainer read the same ids."""

    ids: tuple[int, ...]

    @property
    def engine_ids(self) -> tuple[int, ...]:
        return self.ids

    @property
    def keys(self) -> tuple[int, ...]:
        return self.ids

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class ImageChunk:
    """A reference to an image.

    Args:
        digest: hash of what a model is given of the image: its final pixels and how they are cut into patches.
        placeholder: the id that stands for an image token.
        tokens: how many tokens the image takes.
        pixels: uint8 [height, width, 3], RGB, as they are cut into patches; None where only the identity of the image
            is needed. They are no part of it, the digest stands for them.
    """

    digest: str
    placeholder: int
    tokens: int
    pixels: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def ids(self) -> tuple[int, ...]:
        return (self.placeholder,) * self.tokens

    @property
    def engine_ids(self) -> tuple[int, ...]:
        return (self.placeholder,)

    @property
    def keys(self) -> tuple[int, ...]:
        """One number below 0 for all tokens of the image, so that keys can be sorted together with ids.

        It holds the number of tokens too. So a row of such keys stands for a certain number of whole images, and two
        inputs never begin alike up to the middle of an image.
        """
        return (self._key,) * self.tokens

    @cached_property
    def _key(self) -> int:
        content = f"{self.digest} {self.placeholder} {self.tokens}".encode()
        return -1 - int.from_bytes(blake2b(content, digest_size=KEY_BYTES).digest(), "big")

    def __len__(self) -> int:
        return self.tokens


Chunk = TextChunk | ImageChunk


class ImageReader(Protocol):
    """Preprocessing of images for a vision-language model."""

    placeholder: int
    """Id of the token that the chat template writes for an image."""

    def read(self, pixels: np.ndarray) -> ModelInput:
        """Return what takes the place of the template's placeholder: the image, and the tokens that mark it, if any.

        Args:
            pixels: uint8 [height, width, 3], RGB, of any size.

        Returns:
            An input with one image chunk, whose pixels have their final size: no reader resizes them again.

        Raises:
            ValueError: one sentence about pixels that no image has, or a size that the model cannot read.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sequence of chunks. Neighbouring text chunks are merged, so equal contents are equal inputs.

    For text alone ``ids``, ``keys`` and ``engine_ids`` are one and the same tuple.

    Args:
        chunks: in any cut.
    """

    chunks: tuple[Chunk, ...] = ()
    ids: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The trainer's stream: a placeholder for each token of an image."""
    keys: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """One number per token of the trainer's stream, equal where what was read up to there is equal.

    Ids of text, and numbers below 0 made of the content of images.
    """

    def __post_init__(self) -> None:
        chunks = self.chunks
        if len(chunks) == 1 and type(chunks[0]) is TextChunk and chunks[0].ids:  # nearly always
            object.__setattr__(self, "ids", chunks[0].ids)
            object.__setattr__(self, "keys", chunks[0].ids)
            return
        chunks = tuple(_merged(chunks))
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "ids", _joined([chunk.ids for chunk in chunks]))
        object.__setattr__(self, "keys", _joined([chunk.keys for chunk in chunks]))

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> ModelInput:
        """Return an input of text alone."""
        return cls((TextChunk(tuple(ids)),))

    @staticmethod
    def join(parts: Iterable[ModelInput]) -> ModelInput:
        """Return the concatenation of the parts."""
        parts = list(parts)
        if len(parts) == 1:
            return parts[0]
        if all(part.is_text for part in parts):
            return ModelInput.of_ids(_joined([part.ids for part in parts]))
        return ModelInput(tuple([chunk for part in parts for chunk in part.chunks]))

    @property
    def engine_ids(self) -> tuple[int, ...]:
        """The stream for engines that expand placeholders themselves: one for each image."""
        return _joined([chunk.engine_ids for chunk in self.chunks])

    @property
    def is_text(self) -> bool:
        """Whether it holds no image."""
        return self.keys is self.ids  # of text alone they are one

    @property
    def images(self) -> tuple[ImageChunk, ...]:
        return () if self.is_text else tuple([chunk for chunk in self.chunks if isinstance(chunk, ImageChunk)])

    def behind(self, tokens: int) -> ModelInput:
        """Return what follows the first tokens; an image that they cut in two is left out."""
        chunks: list[Chunk] = []
        for chunk in self.chunks:
            if tokens < len(chunk):
                whole = tokens <= 0
                chunks += [chunk] if whole else [TextChunk(chunk.ids[tokens:])] if isinstance(chunk, TextChunk) else []
            tokens -= len(chunk)
        return ModelInput(tuple(chunks))

    def head(self, length: int) -> ModelInput:
        """Return the first ``length`` tokens, or fewer if that would cut an image."""
        kept: list[Chunk] = []
        for chunk in self.chunks:
            if len(chunk) > length:
                kept += [TextChunk(chunk.ids[:length])] if isinstance(chunk, TextChunk) else []
                break
            kept.append(chunk)
            length -= len(chunk)
        return ModelInput(tuple(kept))

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: ModelInput) -> ModelInput:
        return ModelInput.join((self, other))


@dataclass(frozen=True, slots=True)
class Row:
    """The input of a model as one row, and the positions at which logits or values are computed.

    The hidden state at ``logit_positions[k]`` predicts the next token and carries the value of the state before it.
    """

    input: ModelInput
    logit_positions: tuple[int, ...]
    length: int = field(init=False, repr=False, compare=False)  # of what the model must read, up to the last of them

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", max(self.logit_positions or (0,)) + 1)

    @property
    def ids(self) -> tuple[int, ...]:
        """The trainer's stream."""
        return self.input.ids

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The ids that the model must read; those after the last logit position are only predicted."""
        return self.input.ids[: self.length]

    @property
    def input_keys(self) -> tuple[int, ...]:
        """The keys of these ids, by which rows share prefixes; see :attr:`ModelInput.keys`."""
        return self.input.keys[: self.length]

    @property
    def images(self) -> list[ImageChunk]:
        """Images that the model must read."""
        if self.input.is_text:
            return []
        found, start = [], 0
        for chunk in self.input.chunks:
            if start >= self.length:
                break
            start += len(chunk)
            if isinstance(chunk, ImageChunk):
                found.append(chunk)
        return found


def check_text_only(inputs: Iterable[ModelInput], reader: str) -> None:
    """Refuse images if a reader would take their placeholders for text.

    Raises:
        ValueError: one sentence with the first image.
    """
    for one in inputs:
        for image in one.images:
            raise ValueError(
                f"{reader} reads text only, and got an image of {image.tokens} tokens (digest {image.digest}); "
                "give observations as text"
            )


def _merged(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    for kind, run in groupby(chunks, type):
        if kind is ImageChunk:
            yield from run
        elif ids := _joined([chunk.ids for chunk in run]):
            yield TextChunk(ids)


def _joined(streams: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if len(streams) == 1:
        return streams[0]
    joined: list[int] = []
    for stream in streams:
        joined += stream  # copies pointers, which is much faster than an iterator over tokens
    return tuple(joined)
