"""How many images prompts show, by hand."""

from __future__ import annotations

from lightning_agentrl.distributed import Mean
from lightning_agentrl.metrics.rollout import rollout_numbers
from lightning_agentrl.types import ModelInput, Rollout, Sample, Segment, SegmentKind
from tests.inputs import image, text
from tests.types.samples import turn

OF_IMAGES = {"rollout/prompt_images"}


def sample(*prompts: ModelInput) -> Sample:
    """One sample with as many turns as prompts."""
    segments = []
    for prompt in prompts:
        segments += [Segment(SegmentKind.PROMPT, prompt), Segment(SegmentKind.ACTION, text(5), (-1.0,))]
    return Sample(tuple(segments), tuple(turn() for _ in prompts))


def test_images_of_all_prompts_are_counted_by_turn():
    cat, dog = image("cat"), image("dog")
    rollout = Rollout.from_samples([sample(text(1) + cat, dog + dog), sample(text(2)), sample(text(3))])
    assert rollout_numbers(rollout)["rollout/prompt_images"] == Mean(3, 4)


def test_nothing_is_said_where_there_are_none():
    assert not OF_IMAGES & rollout_numbers(Rollout.from_samples([sample(text(1))])).keys()
