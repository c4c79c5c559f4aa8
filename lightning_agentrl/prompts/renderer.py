"""Chat rendering: what the environment says, as the tokens the policy reads."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.prompts.memory import PastTurn, Recollection
from lightning_agentrl.prompts.parser import split_reply
from lightning_agentrl.prompts.untrusted import Untrusted, role_markers, special_strings
from lightning_agentrl.types import ModelInput, Segment, SegmentKind
from lightning_agentrl.types.model_input import ImageReader, TextChunk

Tool = Mapping[str, Any]  # a function as JSON schema, in the form that chat templates read
Message = dict[str, Any]  # role, and content: a text, or images and a text as a list of items

_IMAGE = "input"  # key of an item that holds an image as the model reads it; templates do not look at it
_SYSTEM, _USER, _REPLY = "probe of the rules", "probe of a message", "probe of a reply"
_TOOL = "probe of a tool's answer"


@dataclass(frozen=True)
class PromptFormat:
    """The wording of prompts.

    Args:
        think: ask for a THINK line before the ACTION line; otherwise a reply is the action alone.
        instruction: text that ends the current user message in place of the built-in one. ``{actions}`` in it stands
            for the names of the actions; an empty text omits the instruction.
        examples: show the worked examples of the environment.
        system: system message in place of the environment's; an empty text omits the message.
        max_prompt_tokens: the most tokens of a rendered prompt, those of images included; the oldest history is dropped
            first.
        max_images: the most images of a prompt; None: no limit. The oldest history is dropped first.
    """

    think: bool = True
    instruction: str | None = None
    examples: bool = True
    system: str | None = None
    max_prompt_tokens: int = 1024
    max_images: int | None = None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")
        if self.max_images is not None and self.max_images < 0:
            raise ValueError(f"max_images must be at least 0 or null, got {self.max_images}")

    def allows(self, prompt: ModelInput) -> bool:
        """Return whether a prompt is within the limits."""
        few = self.max_images is None or len(prompt.images) <= self.max_images
        return few and len(prompt) <= self.max_prompt_tokens


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt and the number of turns of history that were dropped to keep it within its limit."""

    segments: tuple[Segment, ...]
    history_cuts: int


class PromptTooLongError(ValueError):
    """What an environment says now does not fit into a prompt, even without history."""


class ChatRenderer:
    """A renderer of prompts with the chat template of a tokenizer.

    Text of the environment and of earlier replies is not trusted; see :class:`Untrusted`.

    Args:
        tokenizer: with a chat template.
        prompt_format: the wording of prompts.
        image_reader: what the model makes of images; None: it reads text only.

    Raises:
        ValueError: the template cannot render an agent's conversation; see :meth:`probe`.
    """

    append_only: bool  # a rendered conversation is a prefix of the longer one; a growing sample needs it
    turn_close_id: int  # the token that ends an assistant message

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.format = prompt_format or PromptFormat()
        self.image_reader = image_reader
        self._as_items = False  # the template reads contents as lists of items only
        self._heading = "Observation:"
        # A text of so many characters is over the limit of tokens, whatever it says; megabytes are never encoded.
        longest = max(map(len, tokenizer.get_vocab()))
        self._safe = Untrusted(tokenizer, self.probe(), max_chars=longest * (self.format.max_prompt_tokens + 1))

    @cached_property
    def free_text(self) -> ChatRenderer:
        """A renderer for environments that take the whole reply: it asks for no thought and adds no headings."""
        other = copy(self)
        other.format, other._heading = replace(self.format, think=False), ""
        return other

    # What sessions ask for

    def see(self, images: Sequence[np.ndarray]) -> tuple[ModelInput, ...]:
        """Return images of an observation, uint8 [height, width, 3], as the model reads them.

        Raises:
            ConfigError: the model reads text only.
            ValueError: it cannot read an image like one of these.
        """
        if images and self.image_reader is None:
            raise ConfigError(
                f"the environment shows images, and the model '{self.tokenizer.name_or_path}' reads text only; choose "
                "a vision-language model (key model.init_args.model), or text observations (for environments that "
                "offer both, data.init_args.env.kwargs.observation: text)"
            )
        return tuple(self.image_reader.read(image) for image in images) if self.image_reader else ()

    def render(
        self,
        system: str,
        examples: Sequence[tuple[str, str]],
        recollection: Recollection,
        observation: str,
        short_term: str,
        actions: Mapping[str, str],
        images: Sequence[ModelInput] = (),
        tools: Sequence[Tool] = (),
        role: str = "user",
    ) -> RenderedPrompt:
        """Return the prompt of one turn as one segment.

        Args:
            system: rules of the environment. Descriptions of actions that it lacks are listed below it.
            examples: worked examples: an observation and a reply, an action name or THINK and ACTION lines.
            recollection: what the memory shows of the episode.
            observation: long-term text of the observation.
            short_term: text that is shown now and never again.
            actions: names of the allowed actions and their descriptions.
            images: of the observation, from :meth:`see`.
            tools: functions that may be called, for the chat template.
            role: of the message with the observation.

        Raises:
            PromptTooLongError: the prompt is over its limit even without any history.
        """
        parts = self.messages(system, examples, recollection, observation, short_term, actions, images, role)
        head, history, current = parts["system"] + parts["examples"], parts["history"], parts["current"]
        prompts: dict[int, ModelInput] = {}

        def fits(cuts: int) -> bool:
            prompts[cuts] = self._read(head + history[2 * cuts :] + current, generate=True, tools=tools)
            return self.format.allows(prompts[cuts])

        turns = len(recollection.turns)
        cuts = 0 if fits(0) else bisect_left(range(turns + 1), True, lo=1, key=fits)
        if cuts > turns:
            if len(prompts[turns]) <= self.format.max_prompt_tokens:
                raise PromptTooLongError(
                    f"one observation shows {len(images)} images, over the limit of {self.format.max_images}; raise it "
                    "(key data.init_args.prompt.max_images)"
                )
            raise PromptTooLongError(
                f"the prompt without history has {len(prompts[turns])} tokens, over the limit of "
                f"{self.format.max_prompt_tokens}; its parts (system text, examples, notes, current observation, "
                "instruction) are never cut: raise max_prompt_tokens or make them shorter (key "
                "data.init_args.prompt.max_prompt_tokens)"
            )
        return RenderedPrompt((Segment(SegmentKind.PROMPT, prompts[cuts]),), cuts)

    def messages(
        self,
        system: str,
        examples: Sequence[tuple[str, str]],
        recollection: Recollection,
        observation: str,
        short_term: str,
        actions: Mapping[str, str],
        images: Sequence[ModelInput] = (),
        role: str = "user",
    ) -> dict[str, list[Message]]:
        """Return the messages of one turn by part, in order: ``system``, ``examples``, ``history``, ``current``."""
        shown = examples if self.format.examples else ()
        return {
            "system": self._system(system, actions),
            "examples": self._pairs(_shown(text, said) for text, said in shown),
            "history": self._pairs(recollection.turns),
            "current": [
                self._observed(observation, short_term, recollection.note, self._instruction(actions), images, role)
            ],
        }

    def count_tokens(self, messages: list[Message], reply_follows: bool, tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of a conversation, with the header of the next reply if one follows."""
        return len(self._read(messages, generate=reply_follows, tools=tools))

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """Refuse tools that the chat template does not show.

        Raises:
            ValueError: it leaves them or the message of a tool out.
        """
        names = [str(tool.get("function", tool).get("name", "")) for tool in tools]
        start = [self.message("system", _SYSTEM), self.message("user", _USER), self.message("assistant", _REPLY)]
        try:
            text = self._apply([*start, self.message("tool", _TOOL)], tools=tools)
        except TemplateError as error:
            raise ValueError(f"{self._template_name} refuses tools: {error}") from error
        if left_out := [name for name in (*names, _TOOL) if name not in text]:
            raise ValueError(
                f"{self._template_name} leaves out the tools of the environment ({', '.join(left_out)}); choose a "
                "model whose template has tools (key model.init_args.model), or describe them in the system text"
            )

    def continuation(
        self,
        system: str,
        observation: str,
        short_term: str,
        actions: Mapping[str, str],
        closed: bool = True,
        images: Sequence[ModelInput] = (),
        tools: Sequence[Tool] = (),
        role: str = "user",
    ) -> tuple[Segment, ...]:
        """Return what follows a reply in a growing sample: the rest of its turn, the next message, the next header.

        Args:
            system: rules of the environment, as at the start of the episode.
            observation: long-term text of the observation.
            short_term: text that belongs to this turn only.
            actions: names of the allowed actions and their descriptions.
            closed: whether the reply ended with ``turn_close_id``. Otherwise the close comes first, as glue.
            images: of the observation, from :meth:`see`.
            tools: functions that may be called, as at the start of the episode.
            role: of the message with the observation.

        Raises:
            ValueError: the template is not append-only.
        """
        message = self._observed(observation, short_term, "", self._instruction(actions), images, role)
        suffix = self._suffix(self._system(system, actions), message, tools=tools)
        if suffix is None:
            raise ValueError(f"{self._template_name} is not append-only, a growing sample cannot be built with it")
        glue = suffix[: len(suffix) - len(suffix.lstrip())]
        if not closed:
            suffix, glue = self._turn_close + suffix, self._turn_close + glue
        text, *rest = self._with_images(suffix, [message]).chunks  # before the first image
        glue_ids = tuple(self._encode(glue))
        cut = len(glue_ids) if text.ids[: len(glue_ids)] == glue_ids else 0  # 0: the tokenizer joins both parts
        observed = ModelInput((TextChunk(text.ids[cut:]), *rest))
        parts = ((SegmentKind.GLUE, ModelInput.of_ids(text.ids[:cut])), (SegmentKind.OBSERVATION, observed))
        return tuple(Segment(kind, part) for kind, part in parts if part)

    def reply_text(self, thought: str, action: str) -> str:
        """Return a past reply as the history shows it, in the format that the instruction asks for."""
        if not self.format.think:
            return action
        return f"THINK: {thought}\nACTION: {action}" if thought else f"ACTION: {action}"

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: the template's turn close, then the tokenizer's end of sequence if it is another."""
        eos = self.tokenizer.eos_token_id
        return (self.turn_close_id,) if eos in (None, self.turn_close_id) else (self.turn_close_id, int(eos))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def tokens_before(self, ids: Sequence[int], chars: int) -> int:
        """Return how many leading tokens of a reply lie within its first ``chars`` characters."""
        if not chars:
            return 0
        beyond = bisect_left(range(len(ids) + 1), True, key=lambda count: len(self.decode(ids[:count])) > chars)
        return beyond - 1

    # Start-up

    def probe(self) -> set[str]:
        """Check the template once; learn its turn close and whether it is append-only.

        Returns:
            Its role markers that are plain text.

        Raises:
            ValueError: there is no chat template, or it refuses or ignores system messages, does not close a reply with
                a special token, or doubles the beginning-of-sequence token.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of '{self.tokenizer.name_or_path}' has no chat template, and prompts are rendered with "
                "one: use an instruct model, or put a chat_template.jinja into the model folder"
            )
        if self.image_reader is not None:
            self._probe_images(self.image_reader)
        head: list[Message] = [self.message("system", _SYSTEM)]
        pair: list[Message] = [self.message("user", _USER), self.message("assistant", _REPLY)]
        try:
            text = self._apply(head + pair)
        except TemplateError as error:
            raise ValueError(f"{self._template_name} refuses [system, user, assistant] messages: {error}") from error
        if not (_SYSTEM in text and _USER in text and _REPLY in text):
            raise ValueError(f"{self._template_name} leaves out the text of a system, user or assistant message")
        special = special_strings(self.tokenizer)
        strings = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)"
        close = re.match(strings, text[text.rindex(_REPLY) + len(_REPLY) :].lstrip())
        if close is None:
            raise ValueError(f"{self._template_name} does not close a reply with a special token")
        self._turn_close = close[0]
        (self.turn_close_id,) = self._encode(self._turn_close)
        bos = self.tokenizer.bos_token_id
        if bos is not None and self._encode(text)[:2] == [bos, bos]:
            raise ValueError(f"{self._template_name} and the tokenizer both add the token '{self.tokenizer.bos_token}'")
        replies = (_REPLY, f"THINK: {_REPLY}\nACTION: {_REPLY}")
        self.append_only = all(self._suffix(head, pair[0], reply) for reply in replies)
        whole = self._apply([*head, *pair, pair[0]], generate=True)
        markers = role_markers(whole, (_SYSTEM, _USER, _REPLY), special)
        with suppress(TemplateError):  # it knows no tools
            answered = self._apply([*head, *pair, self.message("tool", _TOOL)], generate=True)
            markers |= role_markers(answered, (_SYSTEM, _USER, _REPLY, _TOOL), special)
        return markers

    def _probe_images(self, reader: ImageReader) -> None:
        """Learn whether the template reads texts as they are, and check that it writes one placeholder per image.

        Raises:
            ValueError: it does not.
        """
        try:
            self._as_items = _USER not in self._apply([self.message("user", _USER)])
        except TemplateError:
            self._as_items = True
        items = [{"type": "image"}, {"type": "text", "text": _USER}]
        try:
            count = self._encode(self._apply([{"role": "user", "content": items}])).count(reader.placeholder)
        except TemplateError as error:
            raise ValueError(f"{self._template_name} refuses a message with an image: {error}") from error
        if count != 1:
            raise ValueError(
                f"{self._template_name} writes {count} placeholders for an image; it must write one, with the id "
                f"{reader.placeholder} of the model's config"
            )

    def _suffix(
        self, head: list[Message], message: Message, reply: str = _REPLY, tools: Sequence[Tool] = ()
    ) -> str | None:
        """Return the text that ``message`` and the next header add to a closed reply; None if they rewrite it."""
        start = [*head, self.message("user", _USER), self.message("assistant", reply)]
        before = self._apply(start, tools=tools)
        before = before[: before.rindex(self._turn_close) + len(self._turn_close)]
        after = self._apply([*start, message], generate=True, tools=tools)
        return after[len(before) :] if after.startswith(before) else None

    # Messages

    def _system(self, system: str, actions: Mapping[str, str]) -> list[Message]:
        if self.format.system is not None:
            text = self.format.system
        else:
            listed = [f"- {name}: {text}" for name, text in actions.items() if text and text not in system]
            text = self._safe("\n".join([system, *(["Actions:"] if listed else []), *listed]).strip())
        return [self.message("system", text)] if text else []

    def _pairs(self, turns: Iterable[PastTurn]) -> list[Message]:
        messages = []
        for turn in turns:
            reply = self._safe(self.reply_text(turn.thought, turn.action))
            observed = self._observed(turn.observation, images=turn.images, role=turn.role)
            messages += [observed, self.message("assistant", reply)]
        return messages

    def _observed(
        self,
        observation: str,
        short_term: str = "",
        note: str = "",
        instruction: str = "",
        images: Sequence[ModelInput] = (),
        role: str = "user",
    ) -> Message:
        heading = "" if images and not (short_term or observation) else self._heading
        shown = "\n".join(text for text in (heading, short_term, observation) if text)
        text = self._safe(f"{note}\n\n{shown}" if note else shown)
        return self.message(role, f"{text}\n\n{instruction}" if instruction else text, images)

    def message(self, role: str, text: str, images: Sequence[ModelInput] = ()) -> Message:
        """Return a message in the form that the template reads."""
        if not images and not self._as_items:
            return {"role": role, "content": text}
        return {"role": role, "content": [*({"type": "image", _IMAGE: one} for one in images), _text_item(text)]}

    def _instruction(self, actions: Mapping[str, str]) -> str:
        names = self._safe(", ".join(actions))
        if self.format.instruction is not None:
            return self.format.instruction.replace("{actions}", names)
        if self.format.think:
            action = f"one of {names}" if names else "what you do"
            return f"Answer with two lines.\nTHINK: your reasoning, step by step\nACTION: {action}"
        return f"Answer with one of: {names}" if names else ""

    def _apply(self, messages: list[Message], generate: bool = False, tools: Sequence[Tool] = ()) -> str:
        shown: Any = [dict(tool) for tool in tools] or None
        return str(self.tokenizer.apply_chat_template(messages, shown, tokenize=False, add_generation_prompt=generate))

    def _read(self, messages: list[Message], generate: bool, tools: Sequence[Tool] = ()) -> ModelInput:
        return self._with_images(self._apply(messages, generate, tools), messages)

    def _with_images(self, text: str, messages: list[Message]) -> ModelInput:
        """Return the text as a model input, with the images of the messages in place of their placeholders."""
        ids = self._encode(text)
        images = [image for message in messages for image in images_of(message)]
        if not images:
            return ModelInput.of_ids(ids)
        assert self.image_reader is not None, "images come from `see`"
        places = [place for place, one in enumerate(ids) if one == self.image_reader.placeholder]
        if len(places) != len(images):  # texts of environments cannot hold one
            raise ValueError(
                f"a prompt with {len(images)} images has {len(places)} image placeholders; take them out of the "
                "system text and the instruction (keys data.init_args.prompt.system and .instruction)"
            )
        parts: list[ModelInput] = []
        for start, end, image in zip([0, *(place + 1 for place in places)], places, images, strict=False):
            parts += [ModelInput.of_ids(ids[start:end]), image]
        return ModelInput.join([*parts, ModelInput.of_ids(ids[places[-1] + 1 :])])

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    @property
    def _template_name(self) -> str:
        return f"the chat template of '{self.tokenizer.name_or_path}'"


def images_of(message: Message) -> list[ModelInput]:
    """Return the images of a message, in order."""
    content = message["content"]
    return [] if isinstance(content, str) else [item[_IMAGE] for item in content if _IMAGE in item]


def text_of(message: Message) -> str:
    """Return the text of a message."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(item.get("text", "") for item in content)


def _shown(observation: str, reply: str) -> PastTurn:
    thought, action, _ = split_reply(reply)
    return PastTurn(observation, thought.strip(), action.strip())


def _text_item(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
