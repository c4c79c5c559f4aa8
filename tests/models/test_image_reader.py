"""What a model is given of an image: its final pixels, its tokens, its patches; and what is refused in a sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoImageProcessor, AutoTokenizer, Gemma3Processor, Idefics3Processor

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.loading import read_images
from lightning_agentrl.models.vision import GEMMA3_MARK, IDEFICS3_MARK, IDEFICS3_WHOLE, FamilyReader
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer
from tests.models.seen import picture
from tests.tiny import tiny_vision_folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lru_cache(lambda family: tiny_vision_folder(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def reader_of(folder_of: Callable[[str], Path]) -> Callable[[str], FamilyReader]:
    def read(family: str) -> FamilyReader:
        reader = read_images(str(folder_of(family)))
        assert reader is not None
        return reader

    return lru_cache(read)


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_model_for_text_reads_none(tiny_folder: Path) -> None:
    assert read_images(str(tiny_folder)) is None


@settings(max_examples=25)
@given(height=st.integers(1, 400), width=st.integers(1, 400))
@example(height=1, width=1)
@example(height=1, width=200)
@example(height=5, width=1000)
@example(height=1500, width=8)
@example(height=1200, width=1100)
def test_sizes_and_patches_are_those_of_the_processor(
    reader_of: Callable[[str], FamilyReader], folder_of: Callable[[str], Path], height: int, width: int
) -> None:
    """One resize, whose pixels no second one changes."""
    if max(height, width) > 200 * min(height, width):
        return
    reader, pixels = reader_of("qwen3_vl"), noise(height, width)
    (image,) = reader.read(pixels).images
    assert image.pixels is not None
    own = AutoImageProcessor.from_pretrained(folder_of("qwen3_vl"), backend="pil")
    expected = own(images=[pixels], input_data_format="channels_last", return_tensors="pt")
    found = reader.patches([image])
    assert found["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    assert len(found["pixel_values"]) == image.tokens * reader.patches_per_token
    assert 4 <= image.tokens <= 256
    assert reader.read(image.pixels).images[0] == image


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_the_stream_of_idefics3_is_that_of_its_processor(
    reader_of: Callable[[str], FamilyReader], folder_of: Callable[[str], Path], family: str
) -> None:
    reader, folder, tokenizer = reader_of(family), folder_of(family), AutoTokenizer.from_pretrained(folder_of(family))
    picture_of_size = picture(0, 48, 48)
    processor = AutoImageProcessor.from_pretrained(
        folder, backend="pil", do_image_splitting=False, size={"longest_edge": 48}
    )
    whole = Idefics3Processor(processor, tokenizer, image_seq_len=9)
    expected = whole(images=[[picture_of_size]], text="User:<image>go<end_of_utterance>\n", return_tensors="pt")
    before, after = (tokenizer(part)["input_ids"] for part in ("User:", "go<end_of_utterance>\n"))
    read = reader.read(picture_of_size)
    assert [*before, *read.ids, *after] == expected["input_ids"][0].tolist()
    assert torch.equal(reader.patches(read.images)["pixel_values"][0], expected["pixel_values"][0])


def test_the_stream_of_gemma3_is_that_of_its_processor(tmp_path: Path) -> None:
    """Also where line breaks of template and image are one token."""
    folder = tiny_vision_folder(tmp_path, "gemma3", vocab_words=["\n" * 4] * 9)
    marks = {"boi_token": GEMMA3_MARK, "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=marks)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    whole = Gemma3Processor(processor, tokenizer, image_seq_length=9)
    reader = read_images(str(folder))
    words = PromptFormat(think=False, instruction="", max_prompt_tokens=400)
    chat = ChatRenderer(tokenizer, words, reader).free_text
    pictures = [picture(0, 96, 64), picture(1)]
    (prompt,) = chat.render(Rules("Find it."), Observation("a wall", images=chat.see(pictures))).segments
    items = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "a wall"}]
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Find it."}, {"role": "user", "content": items}],
        tokenize=False,
        add_generation_prompt=True,
    )
    expected = whole(images=[pictures], text=text, add_special_tokens=False, return_tensors="pt")
    assert list(prompt.input.ids) == expected["input_ids"][0].tolist()
    assert [tokenizer.decode([token]) for token in prompt.input.ids].count("\n" * 4) == 2
    assert reader is not None
    assert torch.equal(reader.patches(prompt.input.images)["pixel_values"], expected["pixel_values"])


def test_marks_of_images_are_read_as_the_tokenizer_has_them(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The mark of a whole image may be several tokens of text; one that is missing is told."""
    own = {}
    for missing in (IDEFICS3_WHOLE, IDEFICS3_MARK):
        folder = tmp_path / missing[1:-1]
        shutil.copytree(folder_of("smolvlm"), folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_text((folder / file).read_text().replace(missing, "<something else>"))
        own[missing] = read_images(str(folder))
    image = own[IDEFICS3_WHOLE].read(picture(0))
    tokens = AutoTokenizer.from_pretrained(tmp_path / IDEFICS3_WHOLE[1:-1])
    before, after = (list(chunk.ids) for chunk in (image.chunks[0], image.chunks[-1]))
    assert tokens.decode(before) == IDEFICS3_MARK + IDEFICS3_WHOLE
    assert len(before) > 2
    assert tokens.decode(after) == IDEFICS3_MARK
    with pytest.raises(ConfigError, match=f"no token {IDEFICS3_MARK}.*key model"):
        own[IDEFICS3_MARK].read(picture(0))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_what_an_image_shows_is_in_its_digest(reader_of: Callable[[str], FamilyReader], family: str) -> None:
    reader = reader_of(family)
    first, again, other = (reader.read(picture(seed)) for seed in (0, 0, 1))
    assert first == again
    assert first.keys == again.keys != other.keys
    assert first.ids == other.ids
    wide, tall = (reader.read(np.zeros(shape, dtype=np.uint8)) for shape in ((32, 96, 3), (96, 32, 3)))
    assert (wide.keys == tall.keys) == (family == "smolvlm")  # which makes squares of them
    with pytest.raises(ValueError, match="read-only"):
        first.images[0].pixels[0] = 0  # type: ignore[index]


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_strip_is_refused(reader_of: Callable[[str], FamilyReader], family: str) -> None:
    with pytest.raises(ValueError, match="factor of 200, got 1 x 201"):
        reader_of(family).read(np.zeros((1, 201, 3), dtype=np.uint8))


def test_a_huge_image_is_made_small(reader_of: Callable[[str], FamilyReader]) -> None:
    (image,) = reader_of("qwen2_5_vl").read(np.zeros((4000, 3000, 3), dtype=np.uint8)).images
    assert image.tokens <= 256
    assert image.pixels is not None
    assert image.pixels.size <= 256 * 16 * 16 * 3
