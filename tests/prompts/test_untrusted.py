from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_agentrl.prompts.memory import PastTurn, Recollection
from lightning_agentrl.prompts.messages import Observation, PromptFormat, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import Untrusted, role_markers, special_strings
from lightning_agentrl.types import Segment, input_of
from tests.prompts.templates import TEMPLATES, Marks, make_tokenizer

# What a user of each family would call its role markers; those that are tokens are counted as ids.
PLAIN = {
    "llama2": {"[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"},
    "mistral_v1": {"[INST]", "[/INST]"},
    "zephyr": {"<|system|>", "<|user|>", "<|assistant|>"},
    "olmo2": {"<|system|>", "<|user|>", "<|assistant|>"},
    "vicuna": {"USER:", "ASSISTANT:"},
    "alpaca": {"### Instruction:", "### Response:"},
    "openchat": {"GPT4 Correct System:", "GPT4 Correct User:", "GPT4 Correct Assistant:"},
    "falcon": {"System:", "User:", "Falcon:"},
    "chatml_thinking": {"<think>", "</think>"},
}
WIDE = {ord(char): ord(char) + 0xFEE0 for char in map(chr, range(0x21, 0x7F))}  # NFKC makes them narrow again


@cache
def renderer(name: str, normalized: bool = False) -> ChatRenderer:
    return ChatRenderer(make_tokenizer(TEMPLATES[name], normalized), PromptFormat(max_prompt_tokens=100_000))


def everywhere(chat: ChatRenderer, text: str) -> tuple[Segment, ...]:
    """A prompt, and what follows a reply, with the text in every place that is not the user's own."""
    actions = {f"look{text}": text}
    memory = Recollection((PastTurn(text, text, text),), note=text)
    prompt = chat.render(Rules(f"rules{text}", [(text, text)], actions), Observation(f"a{text}", text), memory)
    following = (
        chat.continuation(Rules(f"rules{text}", actions=actions), Observation(f"a{text}", text))
        if not chat.template.rewriting()
        else ()
    )
    return (*prompt.segments, *following)


def marks_in(chat: ChatRenderer, name: str, text: str) -> dict[str, int]:
    """How often each special token and each role marker is read."""
    ids = input_of(everywhere(chat, text)).ids
    read = chat.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    special = chat.tokenizer.convert_tokens_to_ids(special_strings(chat.tokenizer))
    return {str(i): ids.count(i) for i in special} | {marker: read.count(marker) for marker in PLAIN.get(name, ())}


def hostile(marks: Marks, name: str, seed: int) -> Iterator[str]:
    """Mixtures of whole marks, their halves, look-alikes, and what else upsets parsers, without end."""
    draw = random.Random(seed)
    whole = [*marks.special, *sorted(PLAIN.get(name, ())), marks.header, *marks.user, *marks.reply, *marks.system]
    halves = [part for text in whole for part in (text[: len(text) // 2], text[len(text) // 2 :], text[:1], text[1:])]
    wide = [text.translate(WIDE) for text in whole]
    upset = [
        "\n",
        " ",
        "\u200b",
        "\ufeff",
        "\x00",
        "{{ messages }}",
        "{% raw %}",
        "\u0301",
        "e",
        "12",
        "\u202e",
        "<",
        ">",
    ]
    while True:
        pieces = draw.choices([*whole, *halves, *wide, *upset], k=draw.randint(1, 9))
        yield "".join(pieces)


@pytest.mark.parametrize("name", TEMPLATES)
def test_role_markers_are_learnt_from_the_template(name):
    contents = "probe one", "probe two", "probe three"
    tokenizer = make_tokenizer(TEMPLATES[name])
    roles = zip(("system", "user", "assistant"), contents, strict=True)
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in roles], tokenize=False, add_generation_prompt=True
    )
    assert role_markers(text, contents, special_strings(tokenizer)) == PLAIN.get(name, set())


def test_a_preamble_of_the_template_marks_no_role():
    text = "<s>Rules: [be] kind\nToday: [now]\n[SYS] one [INST] two [/INST]three</s>"
    assert role_markers(text, ("one", "two", "three"), ["<s>", "</s>"]) == {"[SYS]", "[INST]", "[/INST]"}


def check(name: str, seed: int, count: int, normalized: bool) -> None:
    chat = renderer(name, normalized)
    expected = marks_in(chat, name, "plain")
    for _, text in zip(range(count), hostile(TEMPLATES[name], name, seed), strict=False):
        assert marks_in(chat, name, text) == expected, repr(text)


@pytest.mark.parametrize("normalized", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_forges_no_mark(name, normalized):
    check(name, seed=0, count=25, normalized=normalized)


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_ten_thousand_texts_forge_no_mark(name):
    count = 10_000 // len(TEMPLATES) // 2 + 1
    check(name, seed=1, count=count, normalized=False)
    check(name, seed=2, count=count, normalized=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_harmless_text_is_unchanged(name):
    chat = renderer(name)
    text = "a < b [1] 'quoted' user: the system, an assistant\nInstruction: {{ jinja }} <tag> # é中 ｗide"
    tokenizer = chat.tokenizer
    safe = Untrusted(tokenizer, PLAIN.get(name, ()), 10_000)
    assert safe(text) == text
    shown = tokenizer.decode(list(input_of(everywhere(chat, text)).ids), skip_special_tokens=False)
    assert f"a{text}" in shown


def test_normalised_look_alikes_are_found_in_the_ids():
    tokenizer = make_tokenizer(TEMPLATES["zephyr"], normalized=True)
    safe = Untrusted(tokenizer, PLAIN["zephyr"], 10_000)
    for mark in ("</s>", "<|user|>"):
        text = safe(f"before {mark.translate(WIDE)} after")
        read = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert mark not in read
        assert read.startswith("before ")
        assert read.endswith(" after")


def test_megabytes_are_cut_before_they_are_encoded():
    encoded: list[int] = []

    class Counting(PreTrainedTokenizerFast):
        def encode(self, text, *args, **kwargs):
            encoded.append(len(text))
            return super().encode(text, *args, **kwargs)

    tokenizer = make_tokenizer(TEMPLATES["chatml"])
    tokenizer.__class__ = Counting
    chat = ChatRenderer(tokenizer, PromptFormat(max_prompt_tokens=50))
    with pytest.raises(ValueError, match="max_prompt_tokens"):
        chat.render(Rules(), Observation("x" * 5_000_000))
    assert max(encoded) < 10_000


def test_words_that_a_tokenizer_does_not_know_are_harmless():
    core = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "go": 2, ":": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    safe = Untrusted(tokenizer, (), 1000)
    assert safe("Player 1, go: [up]!") == "Player 1, go: [up]!"
    assert "<unk>" not in safe("go <unk>")
