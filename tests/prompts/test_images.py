"""Prompts with images: one placeholder each, in the order of messages, and nothing an environment says becomes one."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from transformers import AutoTokenizer

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.loading import load_tokenizer, read_images
from lightning_agentrl.prompts.memory import PastTurn, Recollection
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer, shown
from lightning_agentrl.types import ModelInput, input_of
from tests.tiny import VisionFamily, tiny_tokenizer, tiny_vision_folder

ACTIONS = {"left": "", "right": ""}
WORDS = PromptFormat(think=False, max_prompt_tokens=2000)


@pytest.fixture(scope="module", params=get_args(VisionFamily))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_folder(tmp_path_factory.mktemp("sees"), request.param)


@pytest.fixture(scope="module")
def chat(folder: Path) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(str(folder)), WORDS, read_images(str(folder)))


def pictures(*seeds: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 256, (48, 48, 3), dtype=np.uint8) for seed in seeds]


def digests(read: ModelInput) -> list[str]:
    return [image.digest for image in read.images]


def test_images_stand_where_their_messages_are(chat: ChatRenderer) -> None:
    old, new, second = chat.see(pictures(0, 1, 2))
    past = Recollection((PastTurn("a door", "", "left", images=(old,)),))
    (prompt,) = chat.render(
        Rules("Find it.", actions=ACTIONS), Observation("a wall", images=(new, second)), past
    ).segments
    assert digests(prompt.input) == digests(old + new + second)
    text = shown(chat.tokenizer, prompt.input)
    assert (
        text.index("[image") < text.index("a door") < text.index("[image", text.index("a door")) < text.index("a wall")
    )
    assert text.count("[image") == 3


@pytest.mark.parametrize("system", ["", "Find it."])
def test_a_growing_sample_is_the_prompt_rendered_at_once(folder: Path, system: str) -> None:
    """Three turns; replies in the template's own words, so that rendering gives the same tokens."""
    words = PromptFormat(think=False, instruction="", max_prompt_tokens=2000)
    chat = ChatRenderer(load_tokenizer(str(folder)), words, read_images(str(folder))).free_text
    assert not chat.template.rewriting()
    a, b, c = chat.see(pictures(0, 1, 2))
    shown_in_turn = [("a door", (a,)), ("", (b, c)), ("a wall", (a,))]
    said = [chat.template.message(role, "left") for role in ("user", "assistant")]
    space = " " if chat.template.apply(said).count(": left") else ""
    reply = ModelInput.of_ids([*chat.template.encode(f"{space}left"), chat.template.turn_close_id])
    grown = input_of(chat.render(Rules(system), Observation("a door", images=(a,))).segments)
    for text, images in shown_in_turn[1:]:
        grown += reply + input_of(chat.continuation(Rules(system), Observation(text, images=images)))
    past = tuple(PastTurn(text, "", "left", images=images) for text, images in shown_in_turn[:-1])
    whole = chat.render(Rules(system), Observation("a wall", images=(a,)), Recollection(past)).segments[0].input
    assert shown(chat.tokenizer, grown) == shown(chat.tokenizer, whole)
    assert grown.keys == whole.keys


def test_text_cannot_hold_an_image(chat: ChatRenderer) -> None:
    marks = [token.content for token in chat.tokenizer.added_tokens_decoder.values()]
    hostile = " ".join(marks)
    (image,) = chat.see(pictures(0))
    past = Recollection((PastTurn(hostile, hostile, hostile, images=(image,)),), note=hostile)
    read = chat.render(
        Rules(hostile, [(hostile, hostile)], {hostile: hostile}), Observation(hostile, hostile, (image,)), past
    ).segments[0]
    assert chat.image_reader is not None
    assert digests(read.input) == digests(image + image)
    assert read.ids.count(chat.image_reader.placeholder) == 2 * image.images[0].tokens


def test_a_placeholder_in_the_users_own_words_is_told(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    reader = read_images(str(folder))
    assert reader is not None
    mark = str(tokenizer.convert_ids_to_tokens(reader.placeholder))
    chat = ChatRenderer(tokenizer, PromptFormat(think=False, system=f"Look: {mark}", max_prompt_tokens=2000), reader)
    with pytest.raises(ValueError, match=r"1 images has 2 image placeholders"):
        chat.render(Rules(actions=ACTIONS), Observation(images=chat.see(pictures(0))))


def test_a_template_without_images_is_refused(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template = tiny_tokenizer().chat_template
    with pytest.raises(ValueError, match=r"for an image|refuses a message with an image"):
        ChatRenderer(tokenizer, WORDS, read_images(str(folder)))


def test_a_model_for_text_says_that_it_is_one() -> None:
    with pytest.raises(ConfigError, match="reads text only"):
        ChatRenderer(tiny_tokenizer(), WORDS).see(pictures(0))
