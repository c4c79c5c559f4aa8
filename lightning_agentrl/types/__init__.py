"""Basic types: segment, turn, sample, rollout, scores."""

from lightning_agentrl.types.model_input import ImageChunk, ModelInput, Row, TextChunk
from lightning_agentrl.types.plain import rollout_from_plain, rollout_to_plain, samples_from_plain, samples_to_plain
from lightning_agentrl.types.rollout import Rollout, Scores
from lightning_agentrl.types.turn import LATE, ForkPlan, Sample, Segment, SegmentKind, StopReason, Turn, input_of

__all__ = [
    "LATE",
    "ForkPlan",
    "ImageChunk",
    "ModelInput",
    "Rollout",
    "Row",
    "Sample",
    "Scores",
    "Segment",
    "SegmentKind",
    "StopReason",
    "TextChunk",
    "Turn",
    "input_of",
    "rollout_from_plain",
    "rollout_to_plain",
    "samples_from_plain",
    "samples_to_plain",
]
