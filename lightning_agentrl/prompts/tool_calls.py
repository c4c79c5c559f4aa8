"""Parsing of tool calls in a reply, in the format that the model's chat template writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_parsing import parse_response

from lightning_agentrl.prompts.template import ChatTemplate, Message, Tool

_CALL = {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}}
_EACH = {"function": {"name": "{name}", "arguments": "{arguments}"}}
_NAMED = {"function": {"name": "{name}", "arguments": "{content}"}}
_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"


def _form(calls: dict[str, Any], **content: Any) -> dict[str, Any]:
    """Return a response template of transformers for tool calls and the text around them."""
    return {"start_anchor_pattern": r"\A", "fields": {"content": content, "tool_calls": calls}}


# Response templates of transformers, tried in this order.
FORMS: Mapping[str, dict[str, Any]] = {
    "hermes": _form(
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True, "transform": _CALL}
    ),
    "list": _form(
        {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "transform": _EACH, "transform_each": True}
    ),
    "parameters": _form(
        {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": _PARAMETER},
            "repeats": True,
            "transform": _NAMED,
        }
    ),
    "llama3": _form(
        {
            "open_pattern": r"(?:<\|python_tag\|>)?\s*(?=\{\s*\"name\")",
            "content": "json",
            "transform": [{"function": {"name": "{content.name}", "arguments": "{content.parameters}"}}],
        }
    ),
    "mistral": _form({"open": "[TOOL_CALLS]", "content": "json", "transform": _EACH, "transform_each": True}),
    "mistral_args": _form(
        {
            "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[\{]+?)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?(?=\{)",
            "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
            "content": "json",
            "repeats": True,
            "transform": _NAMED,
        }
    ),
    "phi4": _form(
        {
            "open": "<|tool_call|>",
            "close": "<|/tool_call|>",
            "content": "json",
            "transform": _EACH,
            "transform_each": True,
        }
    ),
    "gemma4": _form(
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>[^\{]+)(?=\{)",
            "close": "<tool_call|>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "repeats": True,
            "transform": _NAMED,
        }
    ),
    "command": _form(
        {
            "open_pattern": r"(?:Action:\s*```json|<\|START_ACTION\|>)",
            "close_pattern": r"(?:```|<\|END_ACTION\|>)",
            "content": "json",
            "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
            "transform_each": True,
        }
    ),
    "gpt_oss": _form(
        {
            "open_pattern": r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=functions\.(?P<name>\S+?)"
            r"(?:<\|channel\|>commentary)?(?: ?<\|constrain\|>json| json)?<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "transform": [_NAMED],
        }
    ),
}
_QUESTION, _ANSWER = "probe of a question", "probe of an answer"
_ARGUMENTS = {"text": "probe of an argument", "count": 3}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "a text"},
        "count": {"type": "integer", "description": "a number"},
    },
    "required": ["text", "count"],
}
_FUNCTION = {"name": "probe_tool", "description": "A tool.", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL_ID = "probe0001"  # nine characters, since some templates require nine letters and digits


@dataclass(frozen=True)
class ReadReply:
    """Text and tool calls of a reply.

    Args:
        text: text besides the calls; the whole reply if it has no calls or a call could not be parsed.
        calls: name and arguments of each call.
        unread: whether a call could not be parsed.
        unknown: called names that are not tools.
    """

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    unread: bool = False
    unknown: tuple[str, ...] = ()


class ToolCallReader:
    """Parser of a model's tool calls, in a format that is detected by probing its chat template.

    Args:
        template: chat template of the model.

    Raises:
        ValueError: the template leaves out tools, calls or answers, or no known format can parse the template's calls.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        asked: list[Message] = [template.message("user", _QUESTION)]
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe_tool", "arguments": _ARGUMENTS}}
        reply: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        answer: Message = {"role": "tool", "content": _ANSWER, "tool_call_id": _CALL_ID, "name": "probe_tool"}
        try:
            before, after = template.apply(asked, True, [_TOOL]), template.apply([*asked, reply], False, [_TOOL])
            answered = template.apply([*asked, reply, answer], True, [_TOOL])
        except TemplateError as error:
            raise ValueError(f"{template.name} refuses tools: {error}; {_REMEDY}") from error
        if "probe_tool" not in before or _ANSWER not in answered:
            raise ValueError(f"{template.name} leaves out tools or their answers; {_REMEDY}")
        written = after[len(before) :] if after.startswith(before) else after[after.find(_QUESTION) + len(_QUESTION) :]
        close = written.rfind(template.turn_close)
        form = _form_of(written[:close] if close >= 0 else written)
        if form is None:
            raise ValueError(f"{template.name} writes tool calls in an unknown format; {_REMEDY}")
        self.form = form

    def read(self, reply: str, tools: Sequence[Tool]) -> ReadReply:
        """Parse a reply.

        Args:
            reply: text of the reply with special tokens, except the turn-close token.
            tools: tools that the prompt shows.
        """
        try:
            text, calls = _parsed(reply, self.form, tools)
        except (ValueError, KeyError, TypeError):
            return ReadReply(reply, unread=True)
        if not calls:
            return ReadReply(reply)
        known = {str(tool.get("function", tool).get("name")) for tool in tools}
        return ReadReply(text, calls, unknown=tuple(name for name, _ in calls if name not in known))


_REMEDY = (
    "choose a model whose template supports tools, or put a chat_template.jinja that does into the model folder (key "
    "model.init_args.model)"
)


def _form_of(written: str) -> str | None:
    """Return the format that parses the probe call as written by the template, or None."""
    for form in FORMS:
        with suppress(ValueError, KeyError, TypeError):
            if _parsed(written, form, [_TOOL])[1] == (("probe_tool", _ARGUMENTS),):
                return form
    return None


def _parsed(reply: str, form: str, tools: Sequence[Tool]) -> tuple[str, tuple[tuple[str, dict[str, Any]], ...]]:
    """Return the text and the calls of a reply.

    Raises:
        ValueError, KeyError, TypeError: a call cannot be parsed.
    """
    found = parse_response(reply, FORMS[form], prefix="", tools=[dict(tool) for tool in tools])
    return str(found.get("content") or ""), tuple(_call(one) for one in found.get("tool_calls") or ())


def _call(found: Any) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call.

    Raises:
        ValueError: the name is not a text, or the arguments are not an object.
    """
    name, arguments = found["function"]["name"], found["function"]["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a tool call must have a name and an object of arguments")
    return name, arguments
