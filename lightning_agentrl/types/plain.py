"""Serialization of rollouts to plain types and tensors for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lightning_agentrl.types.model_input import Chunk, ImageChunk, ModelInput, TextChunk
from lightning_agentrl.types.rollout import Rollout, Scores
from lightning_agentrl.types.turn import Sample, Segment, SegmentKind, StopReason, Turn

PlainImage = tuple[str, int, int]  # digest, placeholder, tokens
PlainItem = int | PlainImage  # a token id of text, or an image
PixelTable = dict[str, np.ndarray]  # digest -> pixels of the chunk, which are constant and not copied
SavedPixels = Mapping[str, np.ndarray | Tensor]  # digest -> pixels; checkpoints contain tensors
PlainSegment = tuple[str, list[PlainItem], list[float]]  # kind, input, log-probs


def rollout_to_plain(rollout: Rollout) -> dict[str, Any]:
    """Serialize a rollout to dictionaries, lists, numbers, strings and tensors."""
    images: PixelTable = {}
    return {
        "samples": samples_to_plain(rollout.samples, images),
        "images": with_tensors(images),
        "tensors": {f.name: x for f in fields(Rollout) if isinstance(x := getattr(rollout, f.name), Tensor)},
        "scores": {f.name: x for f in fields(Scores) if (x := getattr(rollout.scores, f.name)) is not None},
    }


def rollout_from_plain(plain: dict[str, Any]) -> Rollout:
    """Restore a rollout from the result of :func:`rollout_to_plain`."""
    samples = samples_from_plain(plain["samples"], plain["images"])
    return Rollout(samples=samples, scores=Scores(**plain["scores"]), **plain["tensors"])


def with_tensors(plain: Any) -> Any:
    """Replace arrays in nested dictionaries and lists of dictionaries by tensors, for checkpoints."""
    if isinstance(plain, dict):
        return {key: with_tensors(value) for key, value in plain.items()}
    if isinstance(plain, list) and plain and isinstance(plain[0], dict):
        return [with_tensors(item) for item in plain]
    return torch.tensor(plain) if isinstance(plain, np.ndarray) else plain


def samples_to_plain(samples: Sequence[Sample], images: PixelTable) -> list[dict[str, Any]]:
    """Serialize samples, and add the pixels of their images to ``images``."""
    return [
        {
            "segments": segments_to_plain(sample.segments, images),
            "turns": [_turn_to_plain(turn, images) for turn in sample.turns],
        }
        for sample in samples
    ]


def samples_from_plain(plain: Sequence[dict[str, Any]], images: SavedPixels) -> tuple[Sample, ...]:
    """Restore samples from the result of :func:`samples_to_plain`."""
    return tuple(
        Sample(
            segments_from_plain(sample["segments"], images),
            tuple(_turn_from_plain(turn, images) for turn in sample["turns"]),
        )
        for sample in plain
    )


def segments_to_plain(segments: Sequence[Segment], images: PixelTable) -> list[PlainSegment]:
    """Serialize segments, and add the pixels of their images to ``images``."""
    return [(segment.kind.value, _input_to_plain(segment.input, images), list(segment.logps)) for segment in segments]


def segments_from_plain(plain: Sequence[PlainSegment], images: SavedPixels) -> tuple[Segment, ...]:
    """Restore segments from the result of :func:`segments_to_plain`."""
    return tuple(
        Segment(SegmentKind(kind), _input_from_plain(items, images), tuple(logps)) for kind, items, logps in plain
    )


def inputs_to_plain(inputs: Sequence[ModelInput], images: PixelTable) -> list[list[PlainItem]]:
    """Serialize model inputs, and add the pixels of their images to ``images``."""
    return [_input_to_plain(one, images) for one in inputs]


def inputs_from_plain(plain: Sequence[Sequence[PlainItem]], images: SavedPixels) -> tuple[ModelInput, ...]:
    """Restore model inputs from the result of :func:`inputs_to_plain`."""
    return tuple(_input_from_plain(items, images) for items in plain)


def _input_to_plain(model_input: ModelInput, images: PixelTable) -> list[PlainItem]:
    plain: list[PlainItem] = []
    for chunk in model_input.chunks:
        if isinstance(chunk, ImageChunk):
            plain.append((chunk.digest, chunk.placeholder, chunk.tokens))
            if chunk.pixels is not None and chunk.digest not in images:
                images[chunk.digest] = chunk.pixels
        else:
            plain += chunk.ids
    return plain


def _input_from_plain(plain: Sequence[PlainItem], images: SavedPixels) -> ModelInput:
    chunks: list[Chunk] = []
    for is_image, run in groupby(plain, lambda item: isinstance(item, tuple)):
        if is_image:
            for digest, placeholder, tokens in cast(Iterator[PlainImage], run):
                pixels = np.asarray(images[digest]) if digest in images else None
                chunks.append(ImageChunk(digest, placeholder, tokens, pixels))
        else:
            chunks.append(TextChunk(tuple(cast(Iterator[int], run))))
    return ModelInput(tuple(chunks))


def builtin(value: Any) -> Any:
    """Convert a numpy scalar to Python's type, since checkpoints with numpy types could not be read."""
    return value.item() if isinstance(value, np.generic) else value


def _turn_to_plain(turn: Turn, images: PixelTable) -> dict[str, Any]:
    plain = {f.name: builtin(getattr(turn, f.name)) for f in fields(Turn)}
    metrics = {builtin(name): builtin(value) for name, value in turn.metrics.items()}
    plain |= {"metrics": metrics, "env_errors": list(turn.env_errors), "lost": list(turn.lost)}
    plain |= {"seen": list(turn.seen), "branch_returns": list(map(builtin, turn.branch_returns))}
    plain["image"] = None  # images only serve display
    plain["stop"] = None if turn.stop is None else turn.stop.value
    plain["bootstrap"] = None if turn.bootstrap is None else segments_to_plain(turn.bootstrap, images)
    return plain


def _turn_from_plain(plain: dict[str, Any], images: SavedPixels) -> Turn:
    stop, bootstrap = plain["stop"], plain["bootstrap"]
    return Turn(
        **{
            **plain,
            "stop": None if stop is None else StopReason(stop),
            "env_errors": tuple(plain["env_errors"]),
            "lost": tuple(plain["lost"]),
            "seen": tuple(plain["seen"]),
            "branch_returns": tuple(plain["branch_returns"]),
            "bootstrap": None if bootstrap is None else segments_from_plain(bootstrap, images),
        }
    )
