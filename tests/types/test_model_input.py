"""A model input: what engine and trainer read of it, and how it is told from others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_agentrl.models.prefix_tree import common_prefix_length
from lightning_agentrl.types import ImageChunk, ModelInput, Segment, SegmentKind, TextChunk
from lightning_agentrl.types.model_input import Chunk
from lightning_agentrl.types.plain import PixelTable, segments_from_plain, segments_to_plain, with_tensors
from tests.inputs import PLACEHOLDER, image, text

texts = st.lists(st.sampled_from((1, 2, PLACEHOLDER)), max_size=3).map(lambda ids: TextChunk(tuple(ids)))
images = st.builds(ImageChunk, st.sampled_from(("cat", "dog")), st.sampled_from((PLACEHOLDER, 8)), st.integers(1, 3))
chunk_lists = st.lists(texts | images, max_size=5)
inputs = chunk_lists.map(lambda chunks: ModelInput(tuple(chunks)))


def content(chunks: list[Chunk]) -> list[int | ImageChunk]:
    """What is read, an image as one thing."""
    return [item for chunk in chunks for item in ([chunk] if isinstance(chunk, ImageChunk) else chunk.ids)]


@given(st.lists(inputs, max_size=4))
def test_a_joined_input_reads_as_its_parts_one_after_the_other(parts: list[ModelInput]) -> None:
    joined = ModelInput.join(parts)
    assert len(joined) == len(joined.ids) == len(joined.keys) == sum(map(len, parts))
    for stream in ("ids", "engine_ids", "keys"):
        assert getattr(joined, stream) == sum((getattr(part, stream) for part in parts), ())
    assert joined == sum(parts, ModelInput())
    assert joined.images == sum((part.images for part in parts), ())


def renamed(chunks: list[Chunk], names: Sequence[str]) -> list[Chunk]:
    """The same with other images of equal lengths."""
    return [
        ImageChunk(name, chunk.placeholder, chunk.tokens) if isinstance(chunk, ImageChunk) else chunk
        for chunk, name in zip(chunks, names, strict=False)
    ]


names = st.lists(st.sampled_from(("cat", "dog")), min_size=5, max_size=5)
alike = st.tuples(chunk_lists, names).map(lambda drawn: (drawn[0], renamed(*drawn)))


@given(st.tuples(chunk_lists, chunk_lists) | alike)
def test_keys_are_equal_where_and_only_where_contents_are(pair: tuple[list[Chunk], list[Chunk]]) -> None:
    some, others = pair
    one, other = ModelInput(tuple(some)), ModelInput(tuple(others))
    equal = content(some) == content(others)
    assert (one.keys == other.keys) == (one == other) == equal
    assert one == ModelInput(tuple(TextChunk((i,)) if isinstance(i, int) else i for i in content(some)))
    if equal:
        assert hash(one) == hash(other)


@given(chunk_lists, chunk_lists, chunk_lists)
def test_inputs_begin_alike_as_far_as_their_contents_and_never_within_an_image(
    head: list[Chunk], some: list[Chunk], others: list[Chunk]
) -> None:
    one, other = ModelInput((*head, *some)), ModelInput((*head, *others))
    common = []
    for a, b in zip(content([*head, *some]), content([*head, *others]), strict=False):
        if a != b:
            break
        common.append(a)
    expected = sum(1 if isinstance(item, int) else item.tokens for item in common)
    assert common_prefix_length([one.keys, other.keys]) == expected


@given(inputs, st.integers(0, 20))
def test_a_head_is_as_long_as_it_can_be_without_cutting_an_image(one: ModelInput, length: int) -> None:
    head = one.head(length)
    assert len(head) <= length
    assert common_prefix_length([head.keys, one.keys]) == len(head)
    following = next((c for c in one.chunks[len(head.chunks) :]), None)
    assert len(head) in (length, len(one)) or isinstance(following, ImageChunk)
    if isinstance(following, ImageChunk):
        assert len(head) + len(following) > length


@given(inputs)
def test_images_stand_below_all_ids(one: ModelInput) -> None:
    for key, token in zip(one.keys, one.ids, strict=True):
        assert key == token or key < 0
    assert sum(key < 0 for key in one.keys) == sum(image.tokens for image in one.images)


def test_ids_cannot_tell_images_apart_and_keys_can() -> None:
    cat, dog = text(1, 2) + image("cat") + text(3), text(1, 2) + image("dog") + text(3)
    assert cat.ids == dog.ids == (1, 2, *[PLACEHOLDER] * 4, 3)
    assert cat.keys != dog.keys
    assert cat.keys == (text(1, 2) + image("cat") + text(3)).keys
    said = text(1, 2, *[PLACEHOLDER] * 4, 3)  # a policy may sample the placeholder; it is text then
    assert said.ids == cat.ids
    assert said.keys != cat.keys


def test_an_engine_that_expands_placeholders_gets_one_for_each_image() -> None:
    two = text(1) + image("cat", 3) + image("dog", 2) + text(PLACEHOLDER, 2)
    assert two.engine_ids == (1, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 2)
    assert two.ids == (1, *[PLACEHOLDER] * 5, PLACEHOLDER, 2)


def test_text_alone_is_not_copied() -> None:
    ids = (5, 6, 7)
    one = ModelInput.of_ids(ids)
    assert one.ids is one.engine_ids is one.keys is ids
    assert ModelInput.join([one]) is one
    longer = one + text(8)
    assert longer.ids is longer.keys


@given(inputs.filter(len))
def test_plain_types_hold_images_and_text_as_ever(one: ModelInput) -> None:
    segment = Segment(SegmentKind.OBSERVATION, one)
    assert segments_from_plain(segments_to_plain([segment], {}), {}) == (segment,)
    if not one.images:
        assert segments_to_plain([segment], {}) == [("observation", list(one.ids), [])]


def test_plain_types_hold_the_pixels_of_an_image_once(tmp_path: Path) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    cat = ModelInput((ImageChunk("cat", PLACEHOLDER, 2, pixels),))
    segments = [Segment(SegmentKind.PROMPT, text(1) + cat + text(2) + cat), Segment(SegmentKind.GLUE, cat)]
    images: PixelTable = {}
    plain = segments_to_plain(segments, images)
    assert list(images) == ["cat"]
    assert images["cat"] is pixels  # a snapshot of all running episodes is made in each iteration
    torch.save(with_tensors({"session": [{"images": images}]}), file := tmp_path / "saved")
    saved = torch.load(file, weights_only=True)["session"][0]["images"]
    for table in (images, saved):
        again = segments_from_plain(plain, table)
        assert again == tuple(segments)
        for chunk in (chunk for segment in again for chunk in segment.input.images):
            assert np.array_equal(chunk.pixels, pixels)


@given(inputs, st.data())
def test_what_is_behind_some_tokens_completes_them(one: ModelInput, data: st.DataObject) -> None:
    borders = {0, len(one)} | {
        i for i in range(1, len(one)) if one.keys[i - 1] >= 0 or one.keys[i] >= 0 or one.keys[i] != one.keys[i - 1]
    }
    cut = data.draw(st.sampled_from(sorted(borders)))
    assert one.behind(cut).keys == one.keys[cut:]
