"""Rows: what a model reads in one go, and where it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_agentrl.types.model_input import ImageChunk, ModelInput


@dataclass(frozen=True, slots=True)
class Row:
    """The input of a model as one row, and the positions at which logits or values are computed.

    The hidden state at ``logit_positions[k]`` predicts the next token and carries the value of the state before it.
    """

    input: ModelInput
    logit_positions: tuple[int, ...]
    length: int = field(init=False, repr=False, compare=False)  # of what the model must read, up to the last of them

    def __post_init__(self) -> None:
        length, positions = len(self.input), self.logit_positions or (0,)
        if min(positions) < 0 or max(positions) >= length:
            raise ValueError(f"logit positions {self.logit_positions} must lie within a row of {length} ids")
        object.__setattr__(self, "length", max(positions) + 1)

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
        """Those that the model must read.

        Raises:
            ValueError: the last logit position is within an image.
        """
        if self.input.is_text:
            return []
        found, start = [], 0
        for chunk in self.input.chunks:
            if start >= self.length:
                break
            start += len(chunk)
            if isinstance(chunk, ImageChunk):
                found.append(chunk)
                if start > self.length:
                    raise ValueError(f"a row is read up to position {self.length - 1}, which is within an image")
        return found
