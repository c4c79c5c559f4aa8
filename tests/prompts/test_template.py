"""What published templates can do, and that a growing sample is what a template renders."""

from __future__ import annotations

import pytest

from lightning_agentrl.prompts.format import PromptFormat
from lightning_agentrl.prompts.memory import PastTurn, Recollection
from lightning_agentrl.prompts.messages import Observation, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import ChatTemplate, folded
from lightning_agentrl.types import Segment, input_of
from tests.prompts.templates import TEMPLATES as MARKS
from tests.prompts.templates import make_tokenizer
from tests.published import FOLDER, TEMPLATES, published_tokenizer

FORMAT = PromptFormat(think=False, instruction="", max_prompt_tokens=2000)
RULES, SEEN, SAID, THEN = "Find the door.", "a wall", "turn left", "a door"


def chat(name: str) -> ChatRenderer:
    return ChatRenderer(published_tokenizer(name), FORMAT).free_text


def first(made: ChatRenderer) -> tuple[Segment, ...]:
    return made.render(Rules(RULES), Observation(SEEN)).segments


def text_of(made: ChatRenderer, segments: tuple[Segment, ...]) -> str:
    return made.tokenizer.decode(list(input_of(segments).ids), skip_special_tokens=False)


def test_every_file_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(TEMPLATES)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_probe_finds_what_a_published_template_does(name: str) -> None:
    template, expected = ChatTemplate(published_tokenizer(name)), TEMPLATES[name]
    assert template.folds_system == expected.folds
    assert expected.rewrites in template.rewrites
    assert bool(template.rewrites) == bool(expected.rewrites)
    assert template.turn_close in expected.special


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_word_of_the_environment_is_lost(name: str) -> None:
    """With a history too, where some templates write the system text elsewhere, or leave it out."""
    made = chat(name)
    past = Recollection((PastTurn(SEEN, "", SAID),))
    for shown in (Recollection(), past):
        text = text_of(made, made.render(Rules(RULES), Observation(THEN), shown).segments)
        places = [text.index(word) for word in (RULES, *([SEEN, SAID] if shown.turns else []), THEN)]
        assert places == sorted(places)
        assert all(text.count(word) == 1 for word in (RULES, THEN))


@pytest.mark.parametrize("name", [name for name, one in TEMPLATES.items() if not one.rewrites])
def test_a_growing_sample_is_what_the_template_renders(name: str) -> None:
    """Up to a blank before a reply, which the policy may write itself."""
    made = chat(name)
    grown = text_of(made, first(made)) + SAID + made.template.turn_close
    grown += text_of(made, made.continuation(Rules(RULES), Observation(THEN)))
    whole = text_of(
        made, made.render(Rules(RULES), Observation(THEN), Recollection((PastTurn(SEEN, "", SAID),))).segments
    )
    assert grown == whole.replace(f" {SAID}", SAID)


@pytest.mark.parametrize("name", [name for name, one in TEMPLATES.items() if one.rewrites])
def test_a_template_that_rewrites_builds_no_growing_sample(name: str) -> None:
    with pytest.raises(ValueError, match=f"models/{name}"):
        chat(name).continuation(Rules(RULES), Observation(THEN))


@pytest.mark.parametrize(
    ("asked", "earlier", "message"),
    [
        ("<think>\n\n</think>\n\n", "", "before a reply that is asked for"),
        ("", "<think>\n\n</think>\n\n", "before an earlier reply"),
        ("", "", ""),
        ("", " ", ""),
    ],
)
def test_the_header_of_a_reply_is_part_of_the_history(asked: str, earlier: str, message: str) -> None:
    tokenizer = make_tokenizer(MARKS["chatml"])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        f"{earlier}{{% endif %}}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{asked}{{% endif %}}"
    )
    rewrites = ChatTemplate(tokenizer).rewrites
    assert message in rewrites
    assert bool(rewrites) == bool(message)
    assert repr(asked or earlier) in rewrites or not message


def test_a_template_that_is_silent_about_the_system_text_has_it_folded() -> None:
    tokenizer = make_tokenizer(MARKS["chatml"])
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    made = ChatRenderer(tokenizer, FORMAT).free_text
    assert text_of(made, first(made)) == f"<|im_start|>{RULES}\n\n{SEEN}<|im_end|>"


def test_folding_keeps_images_and_invents_no_message() -> None:
    system, image = {"role": "system", "content": [{"type": "text", "text": "a"}]}, {"type": "image", "input": "x"}
    user = {"role": "user", "content": [image, {"type": "text", "text": "b"}]}
    assert folded([system, user]) == [{"role": "user", "content": [image, {"type": "text", "text": "a\n\nb"}]}]
    mixed = [{"type": "text", "text": "b"}, image, {"type": "text", "text": "c"}, image]
    below = [{"type": "text", "text": "a\n\nb"}, *mixed[1:]]
    assert folded([system, {"role": "user", "content": mixed}]) == [{"role": "user", "content": below}]
    assert folded([system, {"role": "user", "content": [image]}])[0]["content"] == [image, system["content"][0]]
    assert folded([user]) == [user]
    assert folded([]) == []
    answer = {"role": "tool", "content": "c"}
    assert folded([{"role": "system", "content": "a"}, answer]) == [{"role": "user", "content": "a"}, answer]
    assert folded([{"role": "system", "content": ""}, {"role": "user", "content": "b"}])[0]["content"] == "b"
