"""Tool calls and answers in a reply: the last tag counts, a call is JSON, and nothing is ever evaluated."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Prompts show `call`. Some models have a special token for `tool_call`, and a prompt may not contain special tokens.
_CALLS = ("call", "tool_call")
_TAGS = (*_CALLS, "answer")
_MOST_CHARS = 1000  # largest length of a tag's content; also limits the depth of nested JSON


@dataclass(frozen=True)
class Call:
    """A tool call: the name of the tool and the arguments."""

    tool: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A final answer, without the spaces and quotes around it."""

    text: str


class CallError(ValueError):
    """A reply cannot be used; the message is for the agent."""


def last_tag(reply: str) -> str:
    """Return the last complete tag of a reply with its content, such as `<answer>7</answer>`; empty without a tag."""
    found = ""
    place = -1
    for tag in _TAGS:
        end = reply.rfind(f"</{tag}>")
        begin = reply.rfind(f"<{tag}>", 0, max(end, 0))
        if begin >= 0 and end > place:
            found, place = reply[begin : end + len(tag) + 3], end
    return found


def resolve_tag(reply: str, read: Callable[[str], object]) -> tuple[str, bool]:
    """Return the last complete tag of a reply, and whether this tag can be used.

    Args:
        reply: reply of the agent.
        read: function that reads a tag, and raises a CallError if the tag cannot be used.
    """
    tag = last_tag(reply)
    try:
        read(tag)
    except CallError:
        return tag, False
    return tag, True


def read_tag(tag: str) -> Call | Answer:
    """Parse a tag that `last_tag` returned.

    Raises:
        CallError: there is no tag, or the tag cannot be read.
    """
    name = next((name for name in _TAGS if tag.startswith(f"<{name}>")), None)
    if name is None:
        raise CallError("The reply has neither a tool call nor an answer in tags.")
    inside = tag[len(name) + 2 : -len(name) - 3].strip()
    if len(inside) > _MOST_CHARS:
        raise CallError(f"What stands in a tag may have {_MOST_CHARS} characters, not {len(inside)}.")
    if name == "answer":
        text = inside.strip("\"'").strip()
        if not text:
            raise CallError("The answer is empty.")
        return Answer(text)
    try:
        call = json.loads(inside)
    except (ValueError, RecursionError):
        raise CallError("What stands in the tool call is not JSON.") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise CallError('A tool call is a JSON object with "name" and "arguments".')
    arguments = call.get("arguments")
    if not isinstance(arguments, dict):
        raise CallError('The "arguments" of a tool call are a JSON object.')
    return Call(call["name"], arguments)
