"""Model calls of an agent, their replies, and the search for the earlier turn that a call continues. No I/O."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant", "tool")
REMEMBERED = 8192  # number of messages whose digests are cached


class Refusal(Exception):
    """Refusal of a client's request.

    Args:
        message: one sentence for the client.
        status: HTTP status of the answer; clients must not retry the request.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a reply; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Args:
        role: author of the message.
        parts: texts and images in order; an image is the bytes of its file.
        tool_calls: tool calls of an assistant's message.
        answers: id of the tool call that a tool's message answers.
        name: name of the tool, if the client sends it.
    """

    role: Role
    parts: tuple[str | bytes, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """All texts, concatenated."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> tuple[bytes, ...]:
        return tuple(part for part in self.parts if isinstance(part, bytes))


@dataclass(frozen=True)
class Call:
    """One call of the model.

    Args:
        messages: messages of the whole conversation, at least one.
        tools: tools that the model may call, as JSON schemas in the format of OpenAI's chat completions.
        stop: texts that end the reply and are removed from the reply.
        max_tokens: largest number of tokens of the reply; None means the run's limit.
        model: model name that the client sends; metrics are split by this name.
        calls_tools: whether tool calls are parsed from the reply.
        must_call: whether the client requires a tool call in the reply.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    model: str = ""
    calls_tools: bool = True
    must_call: bool = False

    @cached_property
    def beginnings(self) -> list[Beginning]:
        """All prefixes of the conversation, from the empty prefix to the whole conversation."""
        found = [Beginning(_digest(b"", _canonical(self.tools)))]
        for message in self.messages:
            then = Beginning.then if message.images else _then  # do not cache messages with images, which are too large
            found.append(then(found[-1], message))
        return found

    @cached_property
    def digest(self) -> str:
        """Digest of everything that determines the reply: messages, tools and limits of the reply."""
        limits = _canonical([self.stop, self.max_tokens, self.calls_tools])
        return _digest(self.beginnings[-1].digest, limits).hex()


@dataclass(frozen=True)
class Beginning:
    """Prefix of a conversation, for comparison with the prefixes of other calls.

    Generated ids are not compared, only the index of the tool call that a message answers. A text may be in one part or
    in several parts.
    """

    digest: bytes
    open_calls: tuple[str, ...] = ()  # ids of the tool calls of the last assistant message

    def then(self, message: ChatMessage) -> Beginning:
        """Return the prefix that is longer by one message."""
        answered = self.open_calls.index(message.answers) if message.answers in self.open_calls else None
        images = [hashlib.blake2b(image, digest_size=16).hexdigest() for image in message.images]
        calls = [(call.name, _canonical(_as_json(call.arguments))) for call in message.tool_calls]
        content = repr((message.role, message.text, images, calls, answered)).encode()
        ids = tuple([call.id for call in message.tool_calls])
        return Beginning(_digest(self.digest, content), ids if message.role == "assistant" else self.open_calls)


_then = lru_cache(REMEMBERED)(Beginning.then)  # cached, since each call sends the whole conversation again


@dataclass(frozen=True)
class Reply:
    """An assistant's reply.

    Args:
        text: text of the reply, without the tool calls.
        tool_calls: tool calls that were parsed from the reply.
        finish_reason: ``stop`` for a complete reply, ``length`` for a truncated reply, ``tool_calls`` for a reply with
            tool calls.
        prompt_tokens: number of prompt tokens.
        tokens: number of sampled tokens.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def message(self) -> ChatMessage:
        """The reply as a message, in the form in which a client sends the reply back with its next call."""
        return ChatMessage("assistant", (self.text,), self.tool_calls)


@dataclass(frozen=True)
class Reward:
    """A reward that an agent posts. ``call`` is the id of the rewarded completion; empty: the last completion."""

    value: float
    call: str = ""


@dataclass(eq=False)
class Pending:
    """A call and the state of its reply.

    Args:
        id: id of the completion.
        call: call to answer.
        request: digest of the request's path and body, which identifies a repeated request.
        instructed: whether the first message holds instructions that apply to this call only.
    """

    id: str
    call: Call
    request: bytes
    instructed: bool = False
    reply: Reply | Refusal | None = None
    delivered: bool = False  # whether a client received the reply
    waiting: int = 0  # number of clients that wait for the reply
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Place:
    """Place of a call in its episode.

    Args:
        follows: index of the turn that the call continues; None if the call starts a new conversation.
        known: number of leading messages that are not new, up to and including the reply of turn ``follows``.
        occurrence: number of earlier calls of the episode with the same digest.
    """

    follows: int | None
    known: int
    occurrence: int


@dataclass
class Episode:
    """Index of the turns of an episode, which finds the turn that a call continues."""

    turns: int = 0
    # Index of a turn by the prefix that ends with the turn's reply.
    _replied: dict[bytes, int] = field(default_factory=dict)
    _seen: Counter[str] = field(default_factory=Counter)  # number of calls by digest

    def place(self, call: Call) -> Place:
        """Return the turn that a call continues, and count the call.

        A call continues the turn whose reply ends the longest known prefix of its messages. At least one message must
        follow that reply.
        """
        occurrence = self._seen[call.digest]
        self._seen[call.digest] += 1
        for known in range(len(call.messages) - 1, 0, -1):
            if (turn := self._replied.get(call.beginnings[known].digest)) is not None:
                return Place(turn, known, occurrence)
        return Place(None, 0, occurrence)

    def add(self, call: Call, reply: Reply) -> int:
        """Add a turn and return its index. If turns are equal, later calls continue the last of these turns."""
        self._replied[call.beginnings[-1].then(reply.message).digest] = self.turns
        self.turns += 1
        return self.turns - 1


def _as_json(arguments: str) -> Any:
    """Parse the JSON arguments of a tool call, so that comparisons ignore formatting such as whitespace."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, digest_size=16).digest()


def checked_text(value: Any, what: str) -> str:
    """Return a value from a client if it is a text; ``what`` names it in the message.

    Raises:
        Refusal: the value is not a text.
    """
    if not isinstance(value, str):
        raise Refusal(f"{what} must be a text")
    return value


def checked_list(value: Any, what: str) -> Sequence[Any]:
    """Return a value from a client if it is a list; ``what`` names it in the message.

    Raises:
        Refusal: the value is not a list.
    """
    if not isinstance(value, list):
        raise Refusal(f"{what} must be a list")
    return value
