"""Tool calls in published chat templates: read back as written, grown as rendered, or refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_agentrl.models import demo
from lightning_agentrl.prompts.conversation import ConversationRenderer
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import ChatTemplate
from lightning_agentrl.prompts.tool_calls import ToolCallReader
from lightning_agentrl.types import Segment, input_of
from tests.published import FOLDER
from tests.tiny import tiny_tokenizer

DEMO = Path(demo.__file__).with_name("demo_tools.jinja")
FILES = {path.stem: path for path in (*FOLDER.glob("*.jinja"), *FOLDER.glob("tools/*.jinja"), DEMO)}
# The form that is chosen, and whether a row continues behind a tool's answer; otherwise each call begins a new row.
READ = {
    "command_a_tool_use": ("command", False),  # numbers the calls of a conversation
    "demo_tools": ("hermes", True),
    "gemma4_v2": ("gemma4", True),
    "gemma4_v5": ("gemma4", False),  # does not close a reply before a tool's answer
    "gptoss": ("gpt_oss", False),
    "llama3_1": ("llama3", True),
    "llama3_2": ("llama3", True),
    "mistral_v3": ("mistral", True),
    "mistral_v3_tekken": ("mistral", True),
    "qwen2_5": ("hermes", True),
    "qwen3": ("hermes", True),
    "qwen3_5": ("hermes", False),
    "qwen3_5_think": ("parameters", True),
}
LEAVES_OUT = "leaves out tools or their answers"
REFUSED = {
    "command_a": LEAVES_OUT,  # shows tools only beside documents
    "command_a_rag": LEAVES_OUT,
    "deepseek_r1_distill": LEAVES_OUT,
    "gemma2": "refuses tools",
    "gemma3": "refuses tools",
    "llama3": LEAVES_OUT,
    "phi3_5": LEAVES_OUT,
    "phi_4": LEAVES_OUT,
}
CALLS = 200
SPECIAL = re.compile(
    r"<\|[\w ]+\|>|<\|\w+>|<\w+\|>|\[/?[A-Z_]{3,}\]|</?s>|<(?:start|end)_of_\w+>|<(?:eos|bos)>|<｜[^｜]+｜>"
)
# The tokens that begin and end a text are named by tokenizers, not by templates.
STARTS = {"gemma": "<bos>", "mistral": "<s>", "llama": "<|begin_of_text|>", "command": "<BOS_TOKEN>"}
ENDS = {"gemma": "<eos>", "mistral": "</s>", "qwen": "<|im_end|>"}
PARAMETERS = {
    "text": {"type": "string", "description": "a text"},
    "count": {"type": "integer", "description": "a number"},
    "flag": {"type": "boolean", "description": "yes or no"},
    "share": {"type": "number", "description": "a part"},
    "names": {"type": "array", "items": {"type": "string"}, "description": "some texts"},
    "where": {"type": "object", "properties": {"x": {"type": "integer"}}, "description": "a place"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": PARAMETERS, "required": []},
        },
    }
    for name in ("search", "look_up", "get-weather")
]
WORDS = [
    *("a", "Zürich", '"quoted"', "back\\slash", "new\nline", "{brace}", "[list]", "a, b", "true", "7", "tag <b>"),
    *("it's", "漢字", "  spaces  ", "", "http://x.y/?q=1&r=2", "}]}", "\t", "colon: x"),
]


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tiny tokenizer with a template and the special tokens in it."""
    text = FILES[name].read_text()
    start = next((token for family, token in STARTS.items() if name.startswith(family)), None)
    end = next((token for family, token in ENDS.items() if name.startswith(family)), "<|im_end|>")
    tokenizer = tiny_tokenizer(special=sorted({*SPECIAL.findall(text), *filter(None, [start]), end}))
    tokenizer.chat_template, tokenizer.name_or_path = text, f"models/{name}"
    tokenizer.bos_token, tokenizer.eos_token = start, end
    return tokenizer


def random_call(seed: int) -> dict[str, Any]:
    """Return a call of a tool with one to four arguments, whose texts hold what breaks careless readers."""
    generator = random.Random(seed)
    values = {
        "text": " ".join(generator.choices(WORDS, k=3)),
        "count": generator.randint(-999, 999),
        "flag": generator.random() < 0.5,
        "share": round(generator.uniform(-2, 2), 3),
        "names": generator.choices(WORDS, k=generator.randint(0, 3)),
        "where": {"x": generator.randint(0, 9)},
    }
    names = generator.sample(list(values), generator.randint(1, 4))
    tool = generator.choice(TOOLS)["function"]["name"]
    return {"id": f"call{seed:05d}", "name": tool, "arguments": {name: values[name] for name in names}}


def written_call(template: ChatTemplate, call: dict[str, Any], answered: bool) -> str:
    """Return a reply with a call as the template writes it, with a tool's answer behind it or not."""
    function = {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
    reply = {"role": "assistant", "content": "", "tool_calls": [{"id": call["id"], **function}]}
    answer = {"role": "tool", "content": "It is this.", "tool_call_id": call["id"], "name": call["name"]}
    asked = template.message("user", "What is it?")
    before = template.apply([asked], True, TOOLS)
    after = template.apply([asked, reply, *([answer] if answered else [])], answered, TOOLS)
    close = after.find(template.turn_close, len(before))
    return after[len(before) : close if close >= 0 else None]


def grown_and_whole(chat: ChatRenderer, call: dict[str, Any], reply: str) -> tuple[str, str]:
    """Return the row that grows behind a reply with a call and a tool's answer, and their whole rendering.

    The row is empty if the next call of the model begins a new one.
    """
    made = ConversationRenderer(chat)

    def text(*segments: Segment) -> str:
        return str(chat.tokenizer.decode(list(input_of(segments).ids), skip_special_tokens=False))

    asked = {"role": "user", "content": ["What is it?"]}
    called = {**call, "arguments": json.dumps(call["arguments"])}
    answer = {"role": "tool", "content": ["It is this."], "tool_call_id": call["id"], "name": call["name"]}
    before = text(made.whole([asked], (), TOOLS))
    whole = text(made.whole([asked, {"role": "assistant", "content": [""], "tool_calls": [called]}, answer], (), TOOLS))
    added = made.added([answer], (), TOOLS, closed=False)
    return "" if added is None else before + reply + text(*added), whole


def test_every_template_is_read_or_refused() -> None:
    assert {*READ, *REFUSED} == set(FILES)
    assert not set(READ) & set(REFUSED)


@pytest.mark.parametrize("name", READ)
def test_random_calls_are_read_back_and_rows_grow_as_rendered(name: str) -> None:
    form, grows = READ[name]
    format_ = PromptFormat(think=False, instruction="", max_prompt_tokens=10**6)
    chat = ChatRenderer(tokenizer_of(name), format_).free_text
    reader = ToolCallReader(chat.template)
    assert reader.form == form
    for seed in range(CALLS):
        call = random_call(seed)
        reply = written_call(chat.template, call, answered=grows)
        assert reader.read(reply, TOOLS).calls == ((call["name"], call["arguments"]),), reply
        if seed % 20 == 0:
            grown, whole = grown_and_whole(chat, call, reply)
            assert bool(grown) == grows
            assert grown in ("", whole)


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_without_tools_is_refused(name: str) -> None:
    template = ChatTemplate(tokenizer_of(name))
    with pytest.raises(ValueError, match=REFUSED[name]):
        ToolCallReader(template)


def test_the_demo_template_writes_the_same_without_tools() -> None:
    own, plain = tokenizer_of("demo_tools"), tokenizer_of("demo_tools")
    plain.chat_template = (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    for given in (messages, messages[1:]):
        for generate in (False, True):
            assert ChatTemplate(own).apply(given, generate) == ChatTemplate(plain).apply(given, generate)
