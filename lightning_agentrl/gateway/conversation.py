"""Calls of an agent: what it sent, which earlier turn a call follows, and the reply to it. Nothing here does I/O."""

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
REMEMBERED = 8192  # messages whose digest is remembered


class Refusal(Exception):
    """Refusal of a client's request.

    Args:
        message: one sentence.
        status: of the answer; never one that clients repeat.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a reply; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Args:
        role: who speaks.
        parts: texts and, as bytes of their files, images, in order.
        tool_calls: of an assistant.
        answers: id of the call that a tool message answers.
        name: of the tool, if the client gives it.
    """

    role: Role
    parts: tuple[str | bytes, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    answers: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """All texts."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> tuple[bytes, ...]:
        return tuple(part for part in self.parts if isinstance(part, bytes))


@dataclass(frozen=True)
class Call:
    """One call of the model.

    Args:
        messages: of the whole conversation, at least one.
        tools: that may be called, as JSON schemas in the form of OpenAI's chat completions.
        stop: texts that end the reply; they are not part of it.
        max_tokens: most tokens of the reply; None: the run's own limit.
        model: the name that the client asks for. It only separates metrics.
        calls_tools: whether tool calls are read from the reply.
        must_call: whether the client asks for a reply with a tool call.
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
        """The conversation before its first message, after the first one, and so on."""
        found = [Beginning(_digest(b"", _canonical(self.tools)))]
        for message in self.messages:
            then = Beginning.then if message.images else _then  # images are not remembered
            found.append(then(found[-1], message))
        return found

    @cached_property
    def digest(self) -> str:
        """Digest of all that a reply follows from: messages, tools, and what limits the reply."""
        limits = _canonical([self.stop, self.max_tokens, self.calls_tools])
        return _digest(self.beginnings[-1].digest, limits).hex()


@dataclass(frozen=True)
class Beginning:
    """The beginning of a conversation, in as much as another call that goes on from it must share.

    Ids that were generated do not count, only which of the open tool calls a message answers. A text in one part or in
    several is the same.
    """

    digest: bytes
    open_calls: tuple[str, ...] = ()  # ids of the last assistant message

    def then(self, message: ChatMessage) -> Beginning:
        """Return the beginning with one more message."""
        answered = self.open_calls.index(message.answers) if message.answers in self.open_calls else None
        images = [hashlib.blake2b(image, digest_size=16).hexdigest() for image in message.images]
        calls = [(call.name, _canonical(_as_json(call.arguments))) for call in message.tool_calls]
        content = repr((message.role, message.text, images, calls, answered)).encode()
        ids = tuple([call.id for call in message.tool_calls])
        return Beginning(_digest(self.digest, content), ids if message.role == "assistant" else self.open_calls)


_then = lru_cache(REMEMBERED)(Beginning.then)  # each call sends the whole conversation again


@dataclass(frozen=True)
class Reply:
    """An assistant's reply.

    Args:
        text: without what was read as tool calls.
        tool_calls: read from it.
        finish_reason: ``stop``; ``length``: it was cut; ``tool_calls``: it has some.
        prompt_tokens: that were read.
        tokens: that were sampled.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def message(self) -> ChatMessage:
        """The message that a client sends back."""
        return ChatMessage("assistant", (self.text,), self.tool_calls)


@dataclass(frozen=True)
class Reward:
    """A reward that an agent posts; ``call`` is the id of a completion, empty for the last one."""

    value: float
    call: str = ""


@dataclass(eq=False)
class Pending:
    """A call that waits for its reply, and the client that waits.

    Args:
        id: of the completion.
        call: what was asked.
        request: digest of its path and body, by which a repeated request is recognized.
        instructed: whether its first message is the instructions of this call alone.
    """

    id: str
    call: Call
    request: bytes
    instructed: bool = False
    reply: Reply | Refusal | None = None
    delivered: bool = False  # a client got the reply
    waiting: int = 0  # clients that wait for it
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Place:
    """Place of a call in its episode.

    Args:
        follows: number of the turn that it continues; None: it begins anew.
        known: messages up to and with the reply of that turn, which are not new.
        occurrence: earlier calls of the episode with the same digest.
    """

    follows: int | None
    known: int
    occurrence: int


@dataclass
class Episode:
    """The turns of an episode, found again by what a call begins with."""

    turns: int = 0
    _replied: dict[bytes, int] = field(default_factory=dict)  # turns by the beginning that ends with their reply
    _seen: Counter[str] = field(default_factory=Counter)  # calls by digest

    def place(self, call: Call) -> Place:
        """Return the turn that a call continues, and count the call.

        The longest beginning that ends with a reply of ours is what is known, if a message follows it.
        """
        occurrence = self._seen[call.digest]
        self._seen[call.digest] += 1
        for known in range(len(call.messages) - 1, 0, -1):
            if (turn := self._replied.get(call.beginnings[known].digest)) is not None:
                return Place(turn, known, occurrence)
        return Place(None, 0, occurrence)

    def add(self, call: Call, reply: Reply) -> int:
        """Add a turn, and return its number. Of equal turns a later call goes on from the last one."""
        self._replied[call.beginnings[-1].then(reply.message).digest] = self.turns
        self.turns += 1
        return self.turns - 1


def _as_json(arguments: str) -> Any:
    """Return arguments without what clients change when they read and write them, such as blanks."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, digest_size=16).digest()


def checked_text(value: Any, what: str) -> str:
    """Return a text of a client.

    Raises:
        Refusal: it is something else.
    """
    if not isinstance(value, str):
        raise Refusal(f"{what} must be a text")
    return value


def checked_list(value: Any, what: str) -> Sequence[Any]:
    """Return a list of a client.

    Raises:
        Refusal: it is something else.
    """
    if not isinstance(value, list):
        raise Refusal(f"{what} must be a list")
    return value
