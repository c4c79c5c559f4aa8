"""Segments: runs of tokens of one kind, the one representation of what a model read and wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class SegmentKind(StrEnum):
    """What produced a run of tokens."""

    PROMPT = "prompt"  # everything before the first sampled token of a sample
    ACTION = "action"  # sampled by the policy
    OBSERVATION = "observation"  # from the environment, between two actions of one sample
    GLUE = "glue"  # template tokens nobody sampled


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind.

    Args:
        kind: what produced the tokens.
        ids: token ids, at least one.
        logps: log-probabilities under which the engine sampled ``ids``; one per id for actions, empty otherwise.

    Raises:
        ValueError: when ids are missing, or log-probs do not belong to the kind or do not match the ids.
    """

    kind: SegmentKind
    ids: tuple[int, ...]
    logps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError(f"a segment of kind '{self.kind}' needs at least one token id")
        if self.kind is SegmentKind.ACTION and len(self.logps) != len(self.ids):
            raise ValueError(f"an action segment of {len(self.ids)} ids needs as many log-probs, got {len(self.logps)}")
        if self.kind is not SegmentKind.ACTION and self.logps:
            raise ValueError(f"a segment of kind '{self.kind}' was not sampled and must not carry log-probs")

    @property
    def is_action(self) -> bool:
        return self.kind is SegmentKind.ACTION


def flatten_ids(segments: Iterable[Segment]) -> list[int]:
    """Token ids of all segments in order."""
    return [token for segment in segments for token in segment.ids]
