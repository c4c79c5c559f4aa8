"""What published templates can do, and that a growing sample is what a template renders."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest

from lightning_agentrl.prompts.memory import PastTurn, Recollection
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import ChatTemplate, RunDate, folded
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
    assert expected.rewrites in template.rewriting()
    assert bool(template.rewriting()) == bool(expected.rewrites)
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
        ("<think>\n\n</think>\n\n", "", "before the next reply"),
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
    rewrites = ChatTemplate(tokenizer).rewriting()
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


# Tokenizers with a template for conversations with tools beside the one for others

SEARCH = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = "<|im_start|>system\nTools: {{ tools | map(attribute='name') | join(', ') }}<|im_end|>\n" + PLAIN
AT_THE_END = WITH_TOOLS.replace("{% if add", "<|im_start|>system\nWrite a call.<|im_end|>\n{% if add")
LAST_ANSWER = WITH_TOOLS.replace(
    "<|im_end|>\n{% e", "{% if m.role != 'tool' or loop.last %}<|im_end|>\n{% endif %}{% e"
)


def with_tools(tool_use: str) -> ChatRenderer:
    tokenizer = make_tokenizer(replace(MARKS["chatml"], special=("<|im_start|>", "<|im_end|>", "<|eot|>")))
    tokenizer.chat_template = {"default": PLAIN, "tool_use": tool_use}
    return ChatRenderer(tokenizer, FORMAT).free_text


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_growing_sample_with_tools_is_what_the_template_of_tools_renders(role: str) -> None:
    made, rules, seen = with_tools(WITH_TOOLS), Rules(RULES, tools=[SEARCH]), Observation(THEN, role=role)
    made.template.check_tools([SEARCH])
    assert not made.template.rewriting([SEARCH], [role])
    begun = text_of(made, made.render(rules, Observation(SEEN)).segments)
    grown = begun + SAID + made.template.turn_close + text_of(made, made.continuation(rules, seen))
    assert grown == text_of(made, made.render(rules, seen, Recollection((PastTurn(SEEN, "", SAID),))).segments)
    assert "Tools: search" in grown


@pytest.mark.parametrize(
    ("tool_use", "role", "message"),
    [
        (AT_THE_END, "user", "Write a call"),
        (LAST_ANSWER, "tool", "not before an earlier one"),
        (
            WITH_TOOLS.replace("{{ m.role }}", "{{ raise_exception('no tools') if m.role == 'tool' }}"),
            "tool",
            "no tools",
        ),
    ],
)
def test_the_probe_shows_the_tools_and_the_role_that_follows(tool_use: str, role: str, message: str) -> None:
    made = with_tools(tool_use)
    assert not made.template.rewriting()
    assert message in made.template.rewriting([SEARCH], [role])
    with pytest.raises(ValueError, match="models/tiny"):
        made.continuation(Rules(RULES, tools=[SEARCH]), Observation(THEN, role=role))


@pytest.mark.parametrize(
    "tool_use",
    [
        WITH_TOOLS.replace("<|im_end|>\n{% e", "{{ '<|eot|>' if m.role == 'assistant' else '<|im_end|>' }}\n{% e"),
        WITH_TOOLS.replace("in messages", "in messages if m.role != 'system'"),
    ],
)
def test_tools_that_change_the_rest_of_a_conversation_are_refused(tool_use: str) -> None:
    made = with_tools(tool_use)
    with pytest.raises(ValueError, match=r"models/tiny.*key model\.init_args\.model"):
        made.template.check_tools([SEARCH])


def test_no_text_of_a_probe_is_in_a_growing_sample() -> None:
    """Where the template of tools closes replies in its own way, which :meth:`check_tools` refuses."""
    made = with_tools(PLAIN.replace("<|im_end|>\n{% e", "{{ '<|im_end|>' if m.role != 'assistant' }}\n{% e"))
    with pytest.raises(ValueError, match="not append-only"):
        made.continuation(Rules(RULES, tools=[SEARCH]), Observation(THEN))


# Thoughts of earlier replies


@pytest.mark.parametrize(
    ("content", "message"),
    [("m.content.split('</think>')[-1]", "thoughts"), ("m.content | trim", ""), ("m.content", "")],
)
def test_a_template_that_strips_thoughts_does_not_only_append(content: str, message: str) -> None:
    tokenizer = make_tokenizer(MARKS["chatml"])
    tokenizer.chat_template = PLAIN.replace("m.content", f"({content} if m.role == 'assistant' else m.content)")
    rewrites = ChatTemplate(tokenizer).rewriting()
    assert message in rewrites
    assert bool(rewrites) == bool(message)


# The date


@pytest.mark.parametrize(
    "read", ["strftime_now('%f')", "date_string if date_string is defined else strftime_now('%f')"]
)
def test_a_clock_that_goes_on_changes_no_prompt(read: str) -> None:
    tokenizer = make_tokenizer(MARKS["chatml"])
    tokenizer.chat_template = f"{{{{ {read} }}}}{PLAIN}"
    made = ChatRenderer(tokenizer, FORMAT).free_text
    begun = text_of(made, first(made))
    grown = begun + SAID + made.template.turn_close + text_of(made, made.continuation(Rules(RULES), Observation(THEN)))
    past = Recollection((PastTurn(SEEN, "", SAID),))
    assert grown == text_of(made, made.render(Rules(RULES), Observation(THEN), past).segments)


def test_a_date_is_written_in_the_form_of_the_template() -> None:
    tokenizer, date = make_tokenizer(MARKS["chatml"]), RunDate()
    tokenizer.chat_template = f"{{{{ strftime_now('%d %b %Y') }}}}{PLAIN}"
    date.now = datetime(2024, 7, 26)
    template = ChatTemplate(tokenizer, date=date)
    assert template.writes_date
    assert template.apply([template.message("user", "a")]).startswith("26 Jul 2024")
    assert not ChatTemplate(make_tokenizer(MARKS["chatml"])).writes_date


@pytest.mark.parametrize(
    "broken",
    ["{% for i in range(10**9) %}x{% endfor %}", "{{ 1 / 0 }}", "{{ 'x' * 10**12 }}"],
    ids=["runaway", "error", "memory"],
)
def test_a_template_that_cannot_be_rendered_is_refused(broken: str) -> None:
    tokenizer = make_tokenizer(MARKS["chatml"])
    tokenizer.chat_template = broken + str(tokenizer.chat_template)
    with pytest.raises(ValueError, match="the chat template of"):
        ChatTemplate(tokenizer)
