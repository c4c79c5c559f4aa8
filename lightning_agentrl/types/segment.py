"""Segments: runs of tokens of one kind, the one representation of what a model read and wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from lightning_agentrl.types.model_input import ImageChunk, ModelInput


class SegmentKind(StrEnum):
    """What produced a run of tokens."""

    PROMPT = "prompt"  # everything before the first sampled token of a sample
    ACTION = "action"  # sampled by the policy
    OBSERVATION = "observation"  # from the environment, between two actions of one sample
    GLUE = "glue"  # template tokens that nobody sampled


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind.

    Args:
        kind: what produced the tokens.
        input: the tokens, at least one; those of actions are all text.
        logps: log-probabilities under which the engine sampled the tokens; one for each token of an action, empty
            otherwise.

    Raises:
        ValueError: there are no tokens, or an action has another number of log-probs.
    """

    kind: SegmentKind
    input: ModelInput
    logps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.input:
            raise ValueError(f"a segment of kind '{self.kind}' needs at least one token id")
        if self.is_action and len(self.logps) != len(self.input):
            raise ValueError(
                f"an action segment of {len(self.input)} ids needs as many log-probs, got {len(self.logps)}"
            )

    def __len__(self) -> int:
        return len(self.input)

    @property
    def ids(self) -> tuple[int, ...]:
        """The trainer's stream."""
        return self.input.ids

    @property
    def is_action(self) -> bool:
        return self.kind is SegmentKind.ACTION


def input_of(segments: Iterable[Segment]) -> ModelInput:
    """Return what a model reads of the segments, in order."""
    return ModelInput.join([segment.input for segment in segments])


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
        """Those that the model must read."""
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
