"""Chat templates: rendering of messages to text, probes of a template's abilities, and a filter for untrusted text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.errors import first_line
from lightning_agentrl.types import ModelInput
from lightning_agentrl.types.model_input import ImageReader

CLEANED, CLEANED_CHARS = 256, 1 << 14  # number and length of cached texts, since rules and past turns recur
ROUNDS = 3  # attempts to break markers that a normalizer restores; known normalizers need one attempt
PROBED = 64  # number of cached probes, by tools and roles
Tool = Mapping[str, Any]  # a function as JSON schema, in the format of chat templates
Message = dict[str, Any]  # role and content: a text, or a list of text and image items

_IMAGE = "input"  # key of an item's image as model input; templates ignore it
_SYSTEM, _USER, _REPLY = "probe of the rules", "probe of a message", "probe of a reply"
_TOOL = "probe of a tool's answer"
_THOUGHT = "probe of a thought"
_REPLIES = (  # replies without thought, with a THINK line, and in the format of reasoning models
    _REPLY,
    f"THINK: {_THOUGHT}\nACTION: {_REPLY}",
    f"<think>\n{_THOUGHT}\n</think>\n\n{_REPLY}",
)


class RefusedMessagesError(ValueError):
    """The chat template cannot render the messages of an environment."""


class RunDate:
    """The date that chat templates write. The date is fixed for a run, so that prompts do not change overnight."""

    def __init__(self) -> None:
        self.now = datetime.now()

    def arguments(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the arguments of ``apply_chat_template`` that fix the date; empty if the template writes no date."""
        reads_clock = "strftime_now" in str(tokenizer.chat_template)
        return {"strftime_now": lambda form: self.now.strftime(form)} if reads_clock else {}


class ChatTemplate:
    """The chat template of a tokenizer, probed with a few messages at its creation.

    Args:
        tokenizer: tokenizer with a chat template.
        image_reader: converter of images to model inputs; None if the model reads text only.
        date: date of the run. Default: now.

    Raises:
        ValueError: the chat template is missing, leaves out the text of a message, does not close a reply with a
            special token, doubles the beginning-of-sequence token, or does not write one placeholder for each image.
    """

    folds_system: bool = False  # True if system text starts the first user message, without a system role
    turn_close: str  # the special token that ends an assistant message
    turn_close_id: int
    markers: set[str]  # role markers that are plain text

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        image_reader: ImageReader | None = None,
        date: RunDate | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.date = date or RunDate()
        self._dated = self.date.arguments(tokenizer)
        self._reader = image_reader
        self.name = f"the chat template of '{tokenizer.name_or_path}'"
        self._as_items = False  # whether the template requires contents as lists of items
        self._why_refused = lru_cache(PROBED)(self._refusal)
        self._how_it_rewrites = lru_cache(PROBED)(self._rewriting)
        if not tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no chat template, which prompts need: use an "
                "instruct model (key model.init_args.model), or put a chat_template.jinja into the model folder"
            )
        if image_reader is not None:
            self._probe_images(image_reader)
        self._probe()

    def apply(self, messages: list[Message], generate: bool = False, tools: Sequence[Tool] = ()) -> str:
        """Render a conversation to text; with ``generate``, end with the header of the next reply."""
        given = folded(messages) if self.folds_system else messages
        text = rendered(self.tokenizer, given, tools, add_generation_prompt=generate, **self._dated)
        return text if self._reader is None else self._reader.marked(text)

    @property
    def writes_date(self) -> bool:
        """Whether prompts contain the date."""
        return bool(self._dated)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def message(self, role: str, text: str, images: Sequence[ModelInput] = ()) -> Message:
        """Return a message in the template's format, with its images before its text."""
        return self.mixed(role, [*images, text])

    def mixed(self, role: str, parts: Sequence[str | ModelInput]) -> Message:
        """Return a message with texts and images in the given order."""
        if not self._as_items and all(isinstance(part, str) for part in parts):
            return {"role": role, "content": "".join(map(str, parts))}
        items = [_text_item(part) if isinstance(part, str) else {"type": "image", _IMAGE: part} for part in parts]
        return {"role": role, "content": items}

    def suffix(
        self, head: list[Message], messages: list[Message], reply: str = _REPLY, tools: Sequence[Tool] = ()
    ) -> str | None:
        """Return the text that ``messages`` and the next header add after a reply; None if earlier text changes."""
        start = [*head, self.message("user", _USER), self.message("assistant", reply)]
        before = self.apply(start, tools=tools)
        close = before.find(self.turn_close, before.rfind(reply) + len(reply)) if reply in before else -1
        before = before[: close + len(self.turn_close)]
        after = self.apply([*start, *messages], generate=True, tools=tools)
        return after[len(before) :] if close >= 0 and after.startswith(before) else None

    def rewriting(self, tools: Sequence[Tool] = (), roles: Sequence[str] = ("user",)) -> str:
        """Describe how the template rewrites earlier messages when a conversation grows; empty if it only appends.

        Args:
            tools: tools that the prompt shows.
            roles: roles of the messages that follow a reply, in order.
        """
        return self._how_it_rewrites(json.dumps(tools), tuple(roles))

    def check_roles(self, roles: Sequence[str], later: bool, tools: Sequence[Tool] = ()) -> None:
        """Check that the template renders an environment's own messages in order.

        Args:
            roles: roles of the messages, in order.
            later: whether the messages follow a reply; if not, they begin a conversation.
            tools: tools that the prompt shows.

        Raises:
            RefusedMessagesError: the template refuses such a conversation, or leaves out or moves a text.
        """
        if why := self._why_refused(json.dumps(tools), tuple(roles), later):
            raise RefusedMessagesError(f"{self.name} {why}")

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Check that the template shows tools, and that tools change nothing else in the rendered conversation.

        Raises:
            ValueError: the template leaves out the tools, a tool's message or the system text, or closes replies
                in another way than without tools.
        """
        names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
        start = [self.message("system", _SYSTEM), self.message("user", _USER), self.message("assistant", _REPLY)]
        try:
            text = self.apply([*start, self.message("tool", _TOOL)], tools=tools)
        except TemplateError as error:
            raise ValueError(f"{self.name} refuses tools: {error}") from error
        if left_out := [name for name in (*names, _TOOL) if name not in text]:
            raise ValueError(
                f"{self.name} leaves out the tools of the environment ({', '.join(left_out)}); choose a model whose "
                "template has tools (key model.init_args.model), or describe them in the system text"
            )
        shown = [content for content in (_SYSTEM, _USER, _REPLY) if content in text]
        if len(shown) < 3 or self._close_of(text) != self.turn_close:
            raise ValueError(
                f"{self.name} leaves out the system text or a message if there are tools, or does not close a reply "
                f"with '{self.turn_close}' then; choose another model (key model.init_args.model), or put a "
                "chat_template.jinja without this difference into the model folder"
            )

    def _probe(self) -> None:
        head: list[Message] = [self.message("system", _SYSTEM)]
        pair: list[Message] = [self.message("user", _USER), self.message("assistant", _REPLY)]
        try:
            self.folds_system = _SYSTEM not in self.apply(head + pair)
        except TemplateError:
            self.folds_system = True
        try:
            text = self.apply(head + pair)
        except TemplateError as error:
            raise ValueError(f"{self.name} refuses [user, assistant] messages: {error}") from error
        if not (_SYSTEM in text and _USER in text and _REPLY in text):
            raise ValueError(f"{self.name} leaves out the text of a user or assistant message")
        self.turn_close = self._close_of(text)
        if not self.turn_close:
            raise ValueError(f"{self.name} does not close a reply with a special token")
        (self.turn_close_id,) = self.encode(self.turn_close)
        bos = self.tokenizer.bos_token_id
        if bos is not None and self.encode(text)[:2] == [bos, bos]:
            raise ValueError(f"{self.name} and the tokenizer both add the token '{self.tokenizer.bos_token}'")
        whole = self.apply([*head, *pair, pair[0]], generate=True)
        special = special_strings(self.tokenizer)
        self.markers = role_markers(whole, (_SYSTEM, _USER, _REPLY), special)
        with suppress(TemplateError):  # the template may not support tools
            answered = self.apply([*head, *pair, self.message("tool", _TOOL)], generate=True)
            self.markers |= role_markers(answered, (_SYSTEM, _USER, _REPLY, _TOOL), special)

    def _close_of(self, text: str) -> str:
        """Return the special token after the last reply of a rendered probe; empty if no special token follows."""
        special = sorted(special_strings(self.tokenizer), key=len, reverse=True)
        behind = text[text.rindex(_REPLY) + len(_REPLY) :].lstrip()
        return next(filter(behind.startswith, special), "")

    def _refusal(self, tools_json: str, roles: Sequence[str], later: bool) -> str:
        texts = [f"probe of message {number}." for number in range(len(roles))]
        start = [self.message("user", _USER), self.message("assistant", _REPLY)] if later else []
        messages = [self.message(role, text) for role, text in zip(roles, texts, strict=True)]
        named = f"messages of the roles {', '.join(roles)}"
        try:
            shown = self.apply([self.message("system", _SYSTEM), *start, *messages], True, json.loads(tools_json))
        except TemplateError as error:
            return f"refuses {named}: {error}"
        places = [shown.find(text) for text in texts]
        return "" if -1 not in places and places == sorted(places) else f"leaves out or moves {named}"

    def _rewriting(self, tools_json: str, roles: Sequence[str]) -> str:
        """Compare rendered conversations of one, two and three rounds.

        A growing sample consists of a prompt, the reply, and the text that follows. So the header at the end of a
        prompt must equal the header of the same reply in a longer conversation.
        """
        tools = json.loads(tools_json)
        then = [self.message(role, f"probe of message {number}.") for number, role in enumerate(roles)]
        first = [self.message("system", _SYSTEM), self.message("user", _USER)]
        for reply in _REPLIES:
            round_ = [self.message("assistant", reply), *then]
            try:
                suffix = self.suffix(first[:1], then, reply, tools)
                texts = [self.apply([*first, *round_ * count], True, tools) for count in range(3)]
            except TemplateError as error:
                return f"refuses messages of the roles {', '.join(roles)}: {error}"
            if texts[1].count(reply) < 1 or texts[2].count(reply) < 2:
                return "leaves out a part of earlier replies, such as their thoughts"
            if not suffix:
                return "rewrites earlier messages"
            for asked, later in pairwise(texts):
                if header := _other_header(asked, later, reply):
                    return header
        return ""

    def _probe_images(self, reader: ImageReader) -> None:
        """Detect whether the template requires lists of items, and check that it writes one placeholder per image.

        Raises:
            ValueError: the template does not write exactly one placeholder per image.
        """
        try:
            self._as_items = _USER not in self.apply([self.message("user", _USER)])
        except TemplateError:
            self._as_items = True
        items = [{"type": "image"}, {"type": "text", "text": _USER}]
        try:
            count = self.encode(self.apply([{"role": "user", "content": items}])).count(reader.placeholder)
        except TemplateError as error:
            raise ValueError(f"{self.name} refuses a message with an image: {error}") from error
        if count != 1:
            raise ValueError(
                f"{self.name} writes {count} placeholders for an image; it must write one, with the id "
                f"{reader.placeholder} of the model's config: put a chat_template.jinja that does so into the model "
                "folder, or choose another model (key model.init_args.model)"
            )


def _other_header(asked: str, later: str, reply: str) -> str:
    """Describe how a prompt's last header differs from the same header in a longer conversation; empty if equal.

    Args:
        asked: rendered prompt, which ends with the header of the next reply.
        later: rendered conversation with that reply.
        reply: text of the reply.
    """
    same = next((i for i, (one, other) in enumerate(zip(asked, later, strict=False)) if one != other), len(asked))
    if asked[same:]:
        return f"writes {asked[same:]!r} before the next reply, and not before an earlier one"
    between = later[same : later.index(reply, same)]
    if between.strip():  # whitespace is no difference: the policy may write it
        return f"writes {between!r} before an earlier reply, and not before the next one"
    return ""


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Sequence[Tool] = (), **arguments: Any
) -> str:
    """Render messages with the chat template of a tokenizer.

    Raises:
        TemplateError: the template raised any error, such as the OverflowError of a range that its sandbox refuses.
    """
    shown: Any = [dict(tool) for tool in tools] or None
    try:
        return str(tokenizer.apply_chat_template(messages, shown, tokenize=False, **arguments))
    except TemplateError:
        raise
    except Exception as error:  # a template is code and may raise any exception
        raise TemplateError(f"{type(error).__name__}: {first_line(error)}") from error


def folded(messages: list[Message]) -> list[Message]:
    """Return the messages with a leading system message merged into the first user message."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{**system, "role": "user"}, *rest]
    content = rest[0]["content"]
    if isinstance(content, str):
        joined: Any = "\n\n".join(filter(None, (text_of(system), content)))
    else:  # put the system text before the first text, so that images and texts keep their order
        place = next((k for k, item in enumerate(content) if _IMAGE not in item), len(content))
        first = content[place].get("text", "") if place < len(content) else ""
        text = "\n\n".join(filter(None, (text_of(system), first)))
        joined = [*content[:place], _text_item(text), *content[place + 1 :]]
    return [{**rest[0], "content": joined}, *rest[1:]]


def images_of(message: Message) -> list[ModelInput]:
    """Return the images of a message, in order."""
    content = message["content"]
    return [] if isinstance(content, str) else [item[_IMAGE] for item in content if _IMAGE in item]


def text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(item.get("text", "") for item in content)


def _text_item(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


class Untrusted:
    """Filter that makes text of environments, users and earlier replies harmless.

    A string that the tokenizer would read as a special token, or with which the template marks a role (``[/INST]``,
    ``<|user|>``), is broken by a space after its first character. Token ids are checked too, since a normalizer may
    turn other characters into such a string.

    Args:
        tokenizer: tokenizer of the prompts.
        markers: role markers that are plain text.
        max_chars: length at which texts are cut, so large that longer texts exceed the token limit anyway.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, markers: Iterable[str] = (), max_chars: int = 1 << 20
    ) -> None:
        special = special_strings(tokenizer)
        self._start = re.compile(f"(?=(?:{_any_of({*special, *markers})}))(.)", re.DOTALL)
        # Texts may contain the unknown token, but no other special token.
        forged = [text for text in special if text != tokenizer.unk_token]
        self._any = re.compile(_any_of({*forged, *markers}))
        self._special_ids = set(cast(list[int], tokenizer.convert_tokens_to_ids(forged)))
        self._tokenizer = tokenizer
        self._max_chars = max_chars
        self._remembered = lru_cache(CLEANED)(self._clean)

    def __call__(self, text: str) -> str:
        """Return the text, in which no string reads as a special token or a role marker."""
        return self._remembered(text) if len(text) <= CLEANED_CHARS else self._clean(text)

    def _clean(self, text: str) -> str:
        text = text[: self._max_chars]
        for _ in range(ROUNDS):
            text = self._start.sub(r"\1 ", text)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            read = str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
            if self._special_ids.isdisjoint(ids) and not self._any.search(read):
                return text
            text = read
        return re.sub(r"[^\w\s]", " ", text)  # words without punctuation are not markers


def special_strings(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the strings of special tokens, and of added tokens that look like tags."""
    added = tokenizer.added_tokens_decoder.values()
    strings = {token.content for token in added if token.special or re.fullmatch(r"<.+>", token.content)}
    return [text for text in strings | set(tokenizer.all_special_tokens) if len(text) > 1]


def role_markers(text: str, contents: Sequence[str], special: Sequence[str]) -> set[str]:
    """Return the plain-text role markers that a template writes around messages.

    Role markers are words in any brackets (``[INST]``, ``<<SYS>>``, ``<|user|>``), and lines that end with a colon
    (``### Instruction:``, ``USER:``). Bare words (``user``) have no effect without the special token before them.

    Args:
        text: rendered conversation. Before the first message, only the last line is searched.
        contents: contents of the conversation's messages.
        special: strings of special tokens, which are not plain text.
    """
    before, *glue = re.split(_any_of(contents), text)
    pieces = [
        piece
        for between in [before[before.rstrip().rfind("\n") + 1 :], *glue]
        for piece in re.split(_any_of(special), between)
    ]
    lines = [line.strip() for piece in pieces for line in piece.splitlines()]
    bracketed = {word for line in lines for word in line.split() if re.fullmatch(r"[^\w\s].*\w.*[^\w\s]", word)}
    return bracketed | {line for line in lines if line.endswith(":") and re.search(r"\w", line)}


def _any_of(strings: Iterable[str]) -> str:
    """Return a pattern for any of the strings, the longest first."""
    return "|".join(re.escape(text) for text in sorted(strings, key=len, reverse=True)) or r"(?!)"
