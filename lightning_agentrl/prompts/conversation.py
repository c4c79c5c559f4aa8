"""Rendering of conversations that an environment provides, such as an agent program.

If the chat template only appends, a conversation continues the earlier token ids. If not, all messages are rendered
again.

A message is a dictionary with ``role``, ``content`` (a list of texts, with None for the next image), and optionally
``tool_calls`` (each with ``id``, ``name`` and ``arguments`` as JSON text), ``tool_call_id`` and ``name``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile, zip_longest
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.prompts.template import Message, RefusedMessagesError, Tool
from lightning_agentrl.prompts.tool_calls import ReadReply, ToolCallReader
from lightning_agentrl.types import ModelInput, Segment, SegmentKind

Said = Mapping[str, Any]  # a message
FinishReason = Literal["stop", "length", "tool_calls"]
_USER, _REPLY, _PROBE = "probe of a question", "probe of a reply", "probe of message"


@dataclass(frozen=True)
class SampledReply:
    """A sampled reply in the form that the environment gets.

    Args:
        text: text of the reply without tool calls, up to the first stop text.
        tool_calls: ``id``, ``name`` and ``arguments`` of each tool call.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        prompt_tokens: number of prompt tokens.
        tokens: number of sampled tokens.
        unread: whether the reply contains a tool call that cannot be parsed.
        metrics: metrics of the turn.
    """

    text: str
    tool_calls: tuple[Mapping[str, str], ...]
    finish_reason: FinishReason
    prompt_tokens: int
    tokens: int
    unread: bool
    metrics: Mapping[str, float]

    @property
    def message(self) -> Said:
        """The reply as a message, as a client sends it back with its next call."""
        message: dict[str, Any] = {"role": "assistant", "content": [self.text]}
        return message | ({"tool_calls": list(self.tool_calls)} if self.tool_calls else {})

    def as_action(self, key: str | None) -> dict[str, Any]:
        """Return the reply as an action; ``key`` is the key of the answered call, or None."""
        action = {
            "text": self.text,
            "tool_calls": list(self.tool_calls),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
        }
        return action | ({"key": key} if key else {})


class ConversationRenderer:
    """Renderer of conversations that are given as messages.

    Args:
        chat: renderer of prompts, for its chat template and tokenizer.
    """

    def __init__(self, chat: ChatRenderer) -> None:
        self.chat, self.template = chat, chat.template
        self._appends = lru_cache(256)(self._only_appends)
        self._reader: ToolCallReader | None = None

    def whole(self, messages: Sequence[Said], images: Sequence[ModelInput], tools: Sequence[Tool]) -> Segment:
        """Render a whole conversation with the header of the next reply as one prompt.

        Raises:
            RefusedMessagesError: the chat template refuses these messages.
        """
        given = self._messages(messages, images)
        try:
            text = self._text(given, tools)
        except TemplateError as error:
            raise RefusedMessagesError(f"{self.template.name} refuses the messages of a call: {error}") from error
        return Segment(SegmentKind.PROMPT, self.chat.with_images(text, given))

    def added(
        self, messages: Sequence[Said], images: Sequence[ModelInput], tools: Sequence[Tool], closed: bool
    ) -> tuple[Segment, ...] | None:
        """Render the messages that follow a sampled reply; return None if the chat template rewrites earlier text.

        Args:
            messages: messages after the reply.
            images: images of the messages.
            tools: tools that the prompt shows.
            closed: whether the reply ended with the turn-close token.
        """
        shape = tuple([(m["role"], len(m.get("tool_calls") or ())) for m in messages])
        shown = json.dumps(list(tools))
        if not self._appends(shown, shape):
            return None
        given = self._messages(messages, images)
        suffix = self._suffix(given, tools)
        if suffix is None:
            return None
        if not closed:
            suffix = self.template.turn_close + suffix
        return (Segment(SegmentKind.OBSERVATION, self.chat.with_images(suffix, given)),)

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Check that the chat template shows tools and writes tool calls that can be parsed.

        Raises:
            ValueError: the template leaves out tools or writes unparsable calls; the message names the remedy.
        """
        if tools:
            self._tool_calls()

    def reply(
        self, ids: Sequence[int], prompt_tokens: int, call: Mapping[str, Any], tools: Sequence[Tool], turn: int
    ) -> SampledReply:
        """Parse sampled ids into the reply that the environment gets.

        Args:
            ids: sampled token ids.
            prompt_tokens: number of prompt tokens.
            call: call that the reply answers, as in an observation.
            tools: tools that the prompt shows.
            turn: index of the turn, which is part of each tool call's id.
        """
        text = self.chat.decode(ids)
        stops = [text.find(stop) for stop in call.get("stop", ()) if stop in text]
        reads = bool(tools) and call.get("calls_tools", True)
        raw = self.chat.decode_with_markers(ids)
        read = self._tool_calls().read(raw, tools) if reads and not stops else ReadReply(text)
        said = read.text if read.calls else text[: min(stops)] if stops else text
        calls = tuple(
            {"id": f"c{turn:05d}{number:03d}", "name": name, "arguments": json.dumps(arguments)}
            for number, (name, arguments) in enumerate(read.calls)
        )
        ended = stops or (ids and ids[-1] in self.chat.stop_token_ids)
        reason: FinishReason = "tool_calls" if calls else "stop" if ended else "length"
        metrics = {"tools/parsed": float(len(calls)), "tools/unparsed": float(read.unread)} if reads else {}
        if reads:
            metrics["tools/unknown"] = float(len(read.unknown))
            metrics["tools/required_unmet"] = float(bool(call.get("must_call")) and not calls)
        return SampledReply(said, calls, reason, prompt_tokens, len(ids), read.unread, metrics)

    def _tool_calls(self) -> ToolCallReader:
        if self._reader is None:
            self._reader = ToolCallReader(self.template)
        return self._reader

    def _messages(self, messages: Sequence[Said], images: Sequence[ModelInput]) -> list[Message]:
        """Convert messages to the format of chat templates; texts that look like special tokens are made harmless."""
        safe, left = self.chat.writer.safe, iter(images)
        written = []
        for number, message in enumerate(messages):
            parts = [next(left) if part is None else safe(part) for part in message["content"]]
            role = message["role"]
            if role == "system" and number and self.template.folds_system:
                role = "user"
            made = self.template.mixed(role, parts)
            if message.get("tool_calls"):
                made["tool_calls"] = [_call(call, safe) for call in message["tool_calls"]]
            for name in ("tool_call_id", "name"):
                if message.get(name):
                    made[name] = message[name]
            written.append(made)
        return written

    def _text(self, messages: list[Message], tools: Sequence[Tool]) -> str:
        """Render messages; if the template refuses later system messages, their role becomes ``user``."""
        shown = self.chat.writer.tools(tools)
        try:
            return self.template.apply(messages, True, shown)
        except TemplateError:
            if all(message["role"] != "system" for message in messages[1:]):
                raise
        moved = [messages[0], *({**m, "role": "user"} if m["role"] == "system" else m for m in messages[1:])]
        return self.template.apply(moved, True, shown)

    def _suffix(self, messages: list[Message], tools: Sequence[Tool]) -> str | None:
        """Return the text that messages and the next header add to a reply; None if the template closes no reply."""
        reply = self._reply_before(messages)
        try:
            text = self._text([self.template.message("user", _USER), reply, *messages], tools)
        except TemplateError:
            return None
        end = 0
        for _ in reply.get("tool_calls", [reply]):
            end = text.find(_REPLY, end) + len(_REPLY)
        close = text.find(self.template.turn_close, end)
        return text[close + len(self.template.turn_close) :] if close >= 0 else None

    def _reply_before(self, messages: Sequence[Message]) -> Message:
        """Return a probe reply that the messages can follow, with tool calls if the first messages are tool results."""
        answered = []
        for message in messages:
            if message["role"] != "tool":
                break
            answered.append(message)
        reply = self.template.message("assistant", "" if answered else _REPLY)
        if answered:
            reply["tool_calls"] = [
                {
                    "id": message.get("tool_call_id") or f"probe{number:04d}",
                    "type": "function",
                    "function": {"name": message.get("name") or "probe", "arguments": {"probe": _REPLY}},
                }
                for number, message in enumerate(answered)
            ]
        return reply

    def _only_appends(self, tools_json: str, shape: Sequence[tuple[str, int]]) -> bool:
        """Return whether messages of this shape only append their suffix to a conversation, in two probe rounds.

        The suffix is rendered without the conversation before it, so the suffix must not depend on that
        conversation, for example by numbering calls. A reply must be closed before the messages begin.

        Args:
            tools_json: tools that the prompt shows, as JSON.
            shape: role and number of tool calls of each message.
        """
        tools = self.chat.writer.tools(json.loads(tools_json))
        messages = [self.template.message("system", "probe of the rules"), self.template.message("user", _USER)]
        try:
            before = self.template.apply(messages, True, tools)
            for round_ in range(2):
                then = self._probes(shape, round_)
                messages += [self._reply_before(then), *then]
                after, suffix = self.template.apply(messages, True, tools), self._suffix(then, tools)
                if not suffix or not (after.startswith(before) and after.endswith(suffix)):
                    return False
                reply = after[len(before) : -len(suffix)]
                if _REPLY not in reply or _PROBE in reply or not reply.endswith(self.template.turn_close):
                    return False
                before = after
        except TemplateError:
            return False
        return True

    def _probes(self, shape: Sequence[tuple[str, int]], round_: int) -> list[Message]:
        """Return probe messages of a shape, with call ids that differ between rounds."""
        then: list[Message] = []
        for number, (role, calls) in enumerate(shape):
            message = self.template.message(role, f"{_PROBE} {number}.")
            if role == "tool":
                message |= {"tool_call_id": f"probe{round_}{number:03d}", "name": "probe"}
            if calls:
                ids = [f"inner{round_}{number:01d}{call:02d}" for call in range(calls)]
                function = {"name": "probe", "arguments": {}}
                message["tool_calls"] = [{"id": one, "type": "function", "function": function} for one in ids]
            then.append(message)
        return then


def first_difference(before: Sequence[Said], now: Sequence[Said]) -> str:
    """Describe the first difference between two conversations: message, field, and both values."""
    fields = ("role", "content", "tool_calls", "tool_call_id", "name")
    for number, (one, other) in enumerate(zip_longest(before, now)):
        if one is None or other is None:
            return f"message {number} {'was missing' if one is None else 'is missing'}: {_excerpt(one or other)}"
        for field in fields:
            a, b = (message.get(field) or "" for message in (one, other))
            if field == "content":
                a, b = ("".join("[image]" if part is None else part for part in parts) for parts in (a, b))
            if a != b:
                a, b = (x if isinstance(x, str) else json.dumps(x) for x in (a, b))
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
                return f"{field} of message {number} was {_excerpt(a, same)} and is {_excerpt(b, same)}"
    return "the messages are equal; images, tools or limits of the reply differ"


def _excerpt(value: Any, at: int = 0) -> str:
    """Return the part of a text around an index, quoted."""
    text = value if isinstance(value, str) else json.dumps(value)
    start, end = max(at - 40, 0), at + 120
    return f"{'...' if start else ''}{text[start:end]!r}{'...' if len(text) > end else ''}"


@lru_cache(16)
def conversations_of(chat: ChatRenderer) -> ConversationRenderer:
    """Return the conversation renderer of a prompt renderer, which is cached together with its template probes."""
    return ConversationRenderer(chat)


def _call(call: Mapping[str, Any], safe: Any) -> dict[str, Any]:
    """Return a tool call in the format of chat templates; ``safe`` makes its texts harmless."""

    def harmless(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {safe(name): harmless(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [harmless(inner) for inner in value]
        return safe(value) if isinstance(value, str) else value

    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        arguments = call["arguments"]
    function = {"name": safe(call["name"]), "arguments": harmless(arguments)}
    return {"id": call["id"], "type": "function", "function": function}
