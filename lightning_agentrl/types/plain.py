"""Rollouts as plain types and tensors, which checkpoints may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from lightning_agentrl.types.rollout import Rollout, Scores
from lightning_agentrl.types.segment import Segment, SegmentKind
from lightning_agentrl.types.turn import Sample, StopReason, Turn


def rollout_to_plain(rollout: Rollout) -> dict[str, Any]:
    """Dictionaries, lists, numbers, strings and tensors only."""
    return {
        "samples": samples_to_plain(rollout.samples),
        "tensors": {f.name: x for f in fields(Rollout) if isinstance(x := getattr(rollout, f.name), Tensor)},
        "scores": {f.name: x for f in fields(Scores) if (x := getattr(rollout.scores, f.name)) is not None},
    }


def rollout_from_plain(plain: dict[str, Any]) -> Rollout:
    """The rollout that :func:`rollout_to_plain` was given."""
    samples = samples_from_plain(plain["samples"])
    return Rollout(samples=samples, scores=Scores(**plain["scores"]), **plain["tensors"])


def samples_to_plain(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """As :func:`rollout_to_plain`, for samples that are in no rollout yet."""
    return [
        {
            "segments": _segments_to_plain(sample.segments),
            "turns": [_turn_to_plain(turn) for turn in sample.turns],
        }
        for sample in samples
    ]


def samples_from_plain(plain: Sequence[dict[str, Any]]) -> tuple[Sample, ...]:
    """The samples that :func:`samples_to_plain` was given."""
    return tuple(
        Sample(_segments_from_plain(sample["segments"]), tuple(_turn_from_plain(turn) for turn in sample["turns"]))
        for sample in plain
    )


def _segments_to_plain(segments: tuple[Segment, ...]) -> list[tuple[str, list[int], list[float]]]:
    return [(segment.kind.value, list(segment.ids), list(segment.logps)) for segment in segments]


def _segments_from_plain(plain: list[tuple[str, list[int], list[float]]]) -> tuple[Segment, ...]:
    return tuple(Segment(SegmentKind(kind), tuple(ids), tuple(logps)) for kind, ids, logps in plain)


def _turn_to_plain(turn: Turn) -> dict[str, Any]:
    plain = {f.name: getattr(turn, f.name) for f in fields(Turn)}
    plain |= {"metrics": dict(turn.metrics), "env_errors": list(turn.env_errors), "image": None}  # images are for looks
    plain["stop"] = None if turn.stop is None else turn.stop.value
    plain["bootstrap"] = None if turn.bootstrap is None else _segments_to_plain(turn.bootstrap)
    return plain


def _turn_from_plain(plain: dict[str, Any]) -> Turn:
    stop, bootstrap = plain["stop"], plain["bootstrap"]
    return Turn(
        **{
            **plain,
            "stop": None if stop is None else StopReason(stop),
            "env_errors": tuple(plain["env_errors"]),
            "bootstrap": None if bootstrap is None else _segments_from_plain(bootstrap),
        }
    )
