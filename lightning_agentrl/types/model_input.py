"""Model inputs: sequences of chunks, each chunk some text tokens or an image.

In a sequence of token ids an image is a repeated placeholder that does not depend on the image's content. So ids cannot
show whether two inputs have a common prefix. Prefix trees, the key/value cache and the routing to servers compare
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

KEY_BYTES = 16  # bytes of an image's hash; the probability of a collision among a billion images is 2e-21


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Token ids of text. Each id is its own key, and engine and trainer read the same ids."""

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
    """An image, identified by a hash.

    Args:
        digest: hash of the final pixels and the patch sizes.
        placeholder: token id that represents an image token.
        tokens: number of tokens of the image.
        pixels: final pixels [height, width, 3], uint8 RGB, at the size at which they are cut into patches. None if only
            the identity of the image is known. Equality of images does not compare pixels, since the digest identifies
            the image.
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
        """One negative key, repeated for each token of the image; keys can be sorted together with ids.

        The key also depends on the number of tokens of the image. So a common prefix of two inputs never ends inside an
        image.
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
    """Id of the token that stands for an image in the text that :meth:`marked` returns."""

    def marked(self, text: str) -> str:
        """Add the text around images that the model expects and the chat template does not write."""
        ...

    def read(self, pixels: np.ndarray) -> ModelInput:
        """Return the input that replaces the chat template's placeholder: the image and any tokens that mark the image.

        Args:
            pixels: image [height, width, 3], uint8 RGB, of any size.

        Returns:
            An input with one image chunk, whose pixels have their final size and are not resized again.

        Raises:
            ValueError: the pixels are not an image, or have a size that the model cannot read.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sequence of chunks. Neighboring text chunks are merged, so inputs with equal contents are equal.

    For text without images ``ids``, ``keys`` and ``engine_ids`` are the same tuple.

    Args:
        chunks: chunks of text and images.
    """

    chunks: tuple[Chunk, ...] = ()
    ids: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Token ids for the trainer, with one placeholder for each token of an image."""
    keys: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """One key per token of ``ids``: the id for text, a negative hash of the content for images.

    Two inputs have a common prefix of content exactly as far as their keys are equal.
    """

    def __post_init__(self) -> None:
        chunks = self.chunks
        if len(chunks) == 1 and type(chunks[0]) is TextChunk and chunks[0].ids:  # the input is nearly always text only
            object.__setattr__(self, "ids", chunks[0].ids)
            object.__setattr__(self, "keys", chunks[0].ids)
            return
        chunks = tuple(_merged(chunks))
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "ids", _joined([chunk.ids for chunk in chunks]))
        object.__setattr__(self, "keys", _joined([chunk.keys for chunk in chunks]))

    @classmethod
    def of_ids(cls, ids: Sequence[int]) -> ModelInput:
        """Return an input without images, given its token ids."""
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
        """Token ids for engines that expand placeholders themselves, with one placeholder per image."""
        return _joined([chunk.engine_ids for chunk in self.chunks])

    @property
    def is_text(self) -> bool:
        """Whether the input has no images."""
        return self.keys is self.ids  # without images, keys and ids are the same tuple

    @property
    def images(self) -> tuple[ImageChunk, ...]:
        return () if self.is_text else tuple([chunk for chunk in self.chunks if isinstance(chunk, ImageChunk)])

    def behind(self, tokens: int) -> ModelInput:
        """Return the input without its first ``tokens`` tokens; an image is never cut but omitted."""
        chunks: list[Chunk] = []
        for chunk in self.chunks:
            if tokens < len(chunk):
                whole = tokens <= 0
                chunks += [chunk] if whole else [TextChunk(chunk.ids[tokens:])] if isinstance(chunk, TextChunk) else []
            tokens -= len(chunk)
        return ModelInput(tuple(chunks))

    def head(self, length: int) -> ModelInput:
        """Return the first ``length`` tokens, or fewer tokens if the last image would be cut."""
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
    """A model input with the positions at which logits or values are computed.

    The hidden state at a logit position predicts the next token, and gives the value of the state before that token.
    """

    input: ModelInput
    logit_positions: tuple[int, ...]
    length: int = field(init=False, repr=False, compare=False)  # tokens to compute, up to the last logit position

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", max(self.logit_positions or (0,)) + 1)

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids, see :attr:`ModelInput.ids`."""
        return self.input.ids

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Token ids that the model must compute; ids after the last logit position are only predicted."""
        return self.input.ids[: self.length]

    @property
    def input_keys(self) -> tuple[int, ...]:
        """Keys of ``input_ids``, which determine common prefixes of rows; see :attr:`ModelInput.keys`."""
        return self.input.keys[: self.length]

    @property
    def images(self) -> list[ImageChunk]:
        """Images among the tokens that the model must compute."""
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
    """Refuse inputs with images for a model that reads text only.

    Args:
        inputs: inputs to check.
        reader: name of the model, for the error message.

    Raises:
        ValueError: an input has an image; the message names the first such input.
    """
    for one in inputs:
        for image in one.images:
            raise ValueError(
                f"{reader} reads text only, but got an image of {image.tokens} tokens (digest {image.digest}); "
                "use text observations, or a model with images"
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
        joined += stream  # much faster than iterating over the tokens
    return tuple(joined)
