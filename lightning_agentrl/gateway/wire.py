"""The three HTTP protocols of agents: parse requests into :class:`Call`, and write :class:`Reply` as answers.

The sampling fields temperature, top_p, top_k, seed and penalties have no effect, since the run sets their values.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_agentrl.gateway.conversation import (
    ROLES,
    Call,
    ChatMessage,
    Refusal,
    Reply,
    Role,
    ToolCall,
    checked_list,
    checked_text,
)

Body = Mapping[str, Any]
Json = dict[str, Any]
OF_THE_RUN = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
_OTHER_NAMES: Mapping[Any, Role] = {"developer": "system", "function": "tool"}
_REFUSED = ("logit_bias", "response_format")
_KNOWN = {  # fields that are read, or that can be ignored without a warning
    *("messages", "model", "max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences"),
    *("stream", "stream_options", "tools", "tool_choice", "n", "input", "instructions", "previous_response_id"),
    *("system", "metadata", "user", "store", "include", "parallel_tool_calls", "text", "truncation"),
    *OF_THE_RUN,
}


@dataclass(frozen=True)
class Protocol:
    """An HTTP protocol for calls of a model.

    Args:
        read: function (body, earlier messages) -> call. Earlier messages belong to the response that the call
            continues.
        write: function (id, call, reply) -> body of an answer that is not streamed.
        events: function (id, call, reply) -> events of a streamed answer, each a name and data; chat completions have
            empty names.
    """

    read: Callable[[Body, Sequence[ChatMessage]], Call]
    write: Callable[[str, Call, Reply], Json]
    events: Callable[[str, Call, Reply], Iterator[tuple[str, Any]]]


def unknown_fields(body: Body) -> list[str]:
    """Return the unknown fields of a body, which have no effect."""
    return sorted(name for name, value in body.items() if name not in _KNOWN and value is not None)


def _call(body: Body, messages: Sequence[ChatMessage], tools: Sequence[Json], stop: Any, limit: Any) -> Call:
    if body.get("n") not in (None, 1):
        raise Refusal(f"n is {body['n']}, but only 1 reply per call is supported")
    for name in _REFUSED:
        if body.get(name) and body[name] != {"type": "text"}:
            raise Refusal(f"{name} is not supported: it changes sampling, which would break training on the reply")
    if not messages:
        raise Refusal("there is no message")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise Refusal(f"the largest number of tokens of a reply must be an integer of at least 1, got {limit}")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return Call(
        tuple(messages),
        tuple(tools),
        tuple([stop] if isinstance(stop, str) else stop or ()),
        limit,
        str(body.get("model") or ""),
        calls_tools=kind != "none" and bool(tools),
        must_call=kind not in (None, "none", "auto"),
    )


def _parts(content: Any, what: str) -> tuple[str | bytes, ...]:
    """Return the texts and images of a message's content in any protocol.

    Args:
        content: text or list of parts.
        what: name of the message, for errors.
    """
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,)
    parts: list[str | bytes] = []
    for part in checked_list(content, f"the content of {what}"):
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind in ("text", "input_text", "output_text"):
            parts.append(part if isinstance(part, str) else checked_text(part.get("text"), "a text"))
        elif kind == "image_url":
            parts.append(_image(part["image_url"]["url"]))
        elif kind == "input_image":
            parts.append(_image(part.get("image_url")))
        elif kind == "image" and part.get("source", {}).get("type") == "base64":
            parts.append(base64.b64decode(part["source"]["data"]))
        elif kind not in ("thinking", "redacted_thinking", "reasoning"):
            raise Refusal(f"{what} has a part of type {kind!r}; only texts and images are supported")
    return tuple(parts)


def _image(url: Any) -> bytes:
    head, _, data = str(url).partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise Refusal("an image must be a URL data:image/...;base64,...; images are not downloaded")
    return base64.b64decode(data)


def _function(tool: Any) -> Json:
    """Return a tool in the format of chat completions, which chat templates expect."""
    if not isinstance(tool, dict):
        raise Refusal("a tool must be a JSON object")
    if isinstance(tool.get("function"), dict):
        return {"type": "function", "function": dict(tool["function"])}
    if tool.get("type") not in (None, "function", "custom") or "name" not in tool:
        raise Refusal(f"a tool of type {tool.get('type')!r} is not supported; only functions are")
    schema = tool.get("input_schema", tool.get("parameters"))
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema or {}}
    return {"type": "function", "function": described}


def _role(given: Any) -> Role:
    role = _OTHER_NAMES.get(given, given)
    if role not in ROLES:
        raise Refusal(f"the role {role!r} is not known; known: {', '.join(ROLES)}")
    return role


# Functions for chat completions


def _read_chat(body: Body, before: Sequence[ChatMessage]) -> Call:
    messages = []
    for given in checked_list(body.get("messages"), "messages"):
        role = _role(given.get("role"))
        calls = [
            ToolCall(str(one.get("id") or ""), one["function"]["name"], one["function"].get("arguments") or "{}")
            for one in given.get("tool_calls") or ()
        ]
        parts = _parts(given.get("content"), f"a message of the {role}")
        answers, name = str(given.get("tool_call_id") or ""), str(given.get("name") or "")
        messages.append(ChatMessage(role, parts, tuple(calls), answers, name))
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return _call(body, messages, [_function(tool) for tool in body.get("tools") or ()], body.get("stop"), limit)


def _chat_calls(reply: Reply) -> list[Json]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in reply.tool_calls
    ]


def _chat_usage(reply: Reply) -> Json:
    total = reply.prompt_tokens + reply.tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens, "total_tokens": total}


def _write_chat(name: str, call: Call, reply: Reply) -> Json:
    message: Json = {"role": "assistant", "content": reply.text or (None if reply.tool_calls else "")}
    if reply.tool_calls:
        message["tool_calls"] = _chat_calls(reply)
    choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
    head = {"id": name, "object": "chat.completion", "created": 0, "model": call.model}
    return {**head, "choices": [choice], "usage": _chat_usage(reply)}


def _chat_events(name: str, call: Call, reply: Reply) -> Iterator[tuple[str, Any]]:
    head = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": call.model}

    def chunk(delta: Json, reason: str | None = None) -> tuple[str, Any]:
        return "", {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    yield chunk({"role": "assistant", "content": reply.text})
    if reply.tool_calls:
        yield chunk({"tool_calls": [{"index": i, **one} for i, one in enumerate(_chat_calls(reply))]})
    yield chunk({}, reply.finish_reason)
    yield "", {**head, "choices": [], "usage": _chat_usage(reply)}
    yield "", "[DONE]"


# Functions for responses


def _read_responses(body: Body, before: Sequence[ChatMessage]) -> Call:
    messages = list(before)
    given = body.get("input")
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else checked_list(given, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            role = _role(item.get("role"))
            messages.append(ChatMessage(role, _parts(item.get("content"), f"a message of the {role}")))
        elif kind == "function_call":
            call = ToolCall(item["call_id"], item["name"], item["arguments"])
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":  # text and tool calls belong to one sampled reply
                messages[-1] = ChatMessage("assistant", last.parts, (*last.tool_calls, call))
            else:
                messages.append(ChatMessage("assistant", (), (call,)))
        elif kind == "function_call_output":
            messages.append(ChatMessage("tool", _parts(item.get("output"), "an output"), (), item["call_id"]))
        elif kind != "reasoning":
            raise Refusal(f"an input of type {kind!r} is not supported")
    # Instructions for this call only replace the instructions of the call that it continues.
    if body.get("instructions"):
        messages = [ChatMessage("system", (str(body["instructions"]),)), *messages]
    form = (body.get("text") or {}).get("format") or {}
    checked = {**body, "response_format": form if form.get("type") not in (None, "text") else None}
    tools = [_function(tool) for tool in body.get("tools") or ()]
    return _call(checked, messages, tools, None, body.get("max_output_tokens"))


def _response_items(name: str, reply: Reply) -> list[Json]:
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    text = {"type": "output_text", "text": reply.text, "annotations": []}
    said = {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": [text]}
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "status": "completed",
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in reply.tool_calls
    ]
    return [*([said] if reply.text or not calls else []), *calls]


def _write_response(name: str, call: Call, reply: Reply) -> Json:
    cut = reply.finish_reason == "length"
    return {
        "id": name,
        "object": "response",
        "created_at": 0,
        "model": call.model,
        "error": None,
        "status": "incomplete" if cut else "completed",
        "output": _response_items(name, reply),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.tokens,
        },
    }


def _response_events(name: str, call: Call, reply: Reply) -> Iterator[tuple[str, Any]]:
    number = 0
    whole = _write_response(name, call, reply)

    def event(kind: str, **data: Any) -> tuple[str, Any]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number - 1, **data}

    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        of = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            place = {**of, "content_index": 0}
            yield event(
                "response.output_item.added", output_index=index, item={**item, "status": "in_progress", "content": []}
            )
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            yield event("response.output_text.delta", **place, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, part=part)
        else:
            yield event(
                "response.output_item.added",
                output_index=index,
                item={**item, "status": "in_progress", "arguments": ""},
            )
            yield event("response.function_call_arguments.delta", **of, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **of, name=item["name"], arguments=item["arguments"])
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if whole["incomplete_details"] else "response.completed", response=whole)


# Functions for messages


def _read_messages(body: Body, before: Sequence[ChatMessage]) -> Call:
    messages = []
    if body.get("system"):
        messages.append(ChatMessage("system", _parts(body["system"], "system")))
    for given in checked_list(body.get("messages"), "messages"):
        role, content = given.get("role"), given.get("content")
        if role not in ("user", "assistant", "system"):
            raise Refusal(f"the role {role!r} is not known; known: user, assistant")
        blocks = content if isinstance(content, list) else []
        calls = [
            ToolCall(block["id"], block["name"], json.dumps(block["input"]))
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        for block in blocks:  # in a user message, tool results come first
            if block.get("type") == "tool_result":
                parts = _parts(block.get("content"), "a result")
                messages.append(ChatMessage("tool", parts, (), block["tool_use_id"]))
        rest = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result")]
        parts = _parts(rest if blocks else content, f"a message of the {role}")
        if parts or calls or role == "assistant":
            messages.append(ChatMessage(role, parts, tuple(calls)))
    tools = [_function(tool) for tool in body.get("tools") or ()]
    return _call(body, messages, tools, body.get("stop_sequences"), body.get("max_tokens"))


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _write_message(name: str, call: Call, reply: Reply) -> Json:
    texts = [{"type": "text", "text": reply.text}] if reply.text or not reply.tool_calls else []
    uses = [
        {"type": "tool_use", "id": one.id, "name": one.name, "input": json.loads(one.arguments)}
        for one in reply.tool_calls
    ]
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [*texts, *uses],
        "stop_reason": _STOP_REASONS[reply.finish_reason],
        "stop_sequence": None,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.tokens},
    }


def _message_events(name: str, call: Call, reply: Reply) -> Iterator[tuple[str, Any]]:
    whole = _write_message(name, call, reply)

    def event(kind: str, **data: Any) -> tuple[str, Any]:
        return kind, {"type": kind, **data}

    yield event("message_start", message={**whole, "content": [], "stop_reason": None})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": reply.tokens})
    yield event("message_stop")


PROTOCOLS = {  # protocol by path relative to the base URL
    "chat/completions": Protocol(_read_chat, _write_chat, _chat_events),
    "responses": Protocol(_read_responses, _write_response, _response_events),
    "messages": Protocol(_read_messages, _write_message, _message_events),
}
