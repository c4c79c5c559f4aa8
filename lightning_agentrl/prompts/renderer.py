"""Chat rendering: messages to token ids, within the limits of a prompt."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.prompts.memory import Recollection
from lightning_agentrl.prompts.messages import MessageWriter, Observation, PromptFormat, Rules
from lightning_agentrl.prompts.template import (
    ChatTemplate,
    Message,
    RefusedMessagesError,
    RunDate,
    Tool,
    Untrusted,
    images_of,
)
from lightning_agentrl.types import ImageChunk, ModelInput, Segment, SegmentKind
from lightning_agentrl.types.model_input import ImageReader, TextChunk

REMEMBERED, REMEMBERED_TOKENS = 1024, 512  # cached prompts and their tokens: at most 20 MB, 40 bytes per id
REMEMBERED_REPLY_TOKENS = 16  # largest number of tokens of a reply whose text is cached
UTF8_BYTES = 4  # largest number of bytes of a character


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt, and the number of past turns that were dropped to keep it within its limit."""

    segments: tuple[Segment, ...]
    history_cuts: int


class PromptTooLongError(ValueError):
    """A prompt exceeds its limit even without history."""


class ChatRenderer:
    """Renderer of prompts with the chat template of a tokenizer.

    Text of the environment and of earlier replies is not trusted; see :class:`Untrusted`.

    Args:
        tokenizer: tokenizer with a chat template.
        prompt_format: texts and limits of prompts. Default: PromptFormat().
        image_reader: converter of images to model inputs; None if the model reads text only.
        date: date of the run, which some templates write. Default: now.

    Raises:
        ValueError: the template cannot render an agent's conversation; see :class:`ChatTemplate`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat | None = None,
        image_reader: ImageReader | None = None,
        date: RunDate | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.format = prompt_format or PromptFormat()
        self.image_reader = image_reader
        self.template = ChatTemplate(tokenizer, image_reader, date)
        # Texts with more characters exceed the token limit anyway. Cut texts at this length, to never encode megabytes.
        longest = max(map(len, tokenizer.get_vocab()))
        self._most = longest * (self.format.max_prompt_tokens + 1)
        self._safe = Untrusted(tokenizer, self.template.markers, max_chars=self._most)
        self.writer = MessageWriter(self.format, self.template, self._safe)
        self._remembered: dict[Hashable, RenderedPrompt] = {}  # cache, since prompts of small games recur
        self._short_reply = lru_cache(REMEMBERED)(self._decode)  # short replies recur

    @cached_property
    def free_text(self) -> ChatRenderer:
        """A renderer for environments whose action is the whole reply, without headings and requests for thoughts."""
        other = copy(self)
        other.format = replace(self.format, think=False)
        other.writer = MessageWriter(other.format, self.template, self._safe, free_text=True)
        other._remembered = {}
        return other

    def see(self, images: Sequence[np.ndarray]) -> tuple[ModelInput, ...]:
        """Convert images of an observation, uint8 [height, width, 3], to model inputs.

        Raises:
            ConfigError: the model reads text only.
            ValueError: the model cannot read one of the images, for example because of its size.
        """
        if images and self.image_reader is None:
            raise ConfigError(
                f"the environment shows images, and the model '{self.tokenizer.name_or_path}' reads text only; choose "
                "a vision-language model (key model.init_args.model), or text observations (for environments that "
                "offer both, data.init_args.env.kwargs.observation: text)"
            )
        return tuple(self.image_reader.read(image) for image in images) if self.image_reader else ()

    def render(
        self, rules: Rules, observation: Observation, recollection: Recollection | None = None
    ) -> RenderedPrompt:
        """Render the prompt of one turn as one segment.

        Args:
            rules: texts of the environment for every prompt.
            observation: current observation.
            recollection: part of the past that the memory shows; None shows nothing.

        Raises:
            RefusedMessagesError: the chat template refuses messages of these roles.
            PromptTooLongError: the prompt exceeds its limit even without history.
        """
        recollection = recollection or Recollection()
        if observation.role != "user" or observation.messages:  # every template accepts user messages
            self._check_roles(rules, observation, later=bool(recollection.turns))
        shown = None if rules.tools else _shown(rules, observation, recollection)
        # The key contains the date, since loading a checkpoint may change it.
        key = None if shown is None else (self.template.date.now, shown)
        if key is not None and key in self._remembered:
            return self._remembered[key]
        prompt = self._fitted(rules, observation, recollection)
        read = prompt.segments[0].input
        # Only text is cached: images would take gigabytes.
        if key is not None and read.is_text and len(read) <= REMEMBERED_TOKENS:
            if len(self._remembered) == REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = prompt
        return prompt

    def _fitted(self, rules: Rules, observation: Observation, recollection: Recollection) -> RenderedPrompt:
        """Render the prompt with as many of the last turns as fit."""
        past, note = recollection.turns, recollection.note
        parts = self.writer.parts(rules, observation, Recollection(note=note))
        head, current = parts["system"] + parts["examples"], parts["current"]
        prompts: dict[int, ModelInput] = {}

        def fits(cuts: int) -> bool:
            messages = head + self.writer.turns(past[cuts:]) + current
            prompts[cuts] = self._read(messages, generate=True, tools=rules.tools)
            return self.format.allows(prompts[cuts])

        turns = len(past)
        cuts = 0 if fits(0) else bisect_left(range(turns + 1), True, lo=1, key=fits)
        if cuts <= turns:
            return RenderedPrompt((Segment(SegmentKind.PROMPT, prompts[cuts]),), cuts)
        if len(prompts[turns]) <= self.format.max_prompt_tokens:
            raise PromptTooLongError(
                f"one observation has {len(observation.images)} images, over the limit of {self.format.max_images}; "
                "raise it (key data.init_args.prompt.max_images)"
            )
        longest = max(map(len, (rules.system, note, observation.text, observation.short_term)))
        more, text = "", ""
        if longest > self._most:  # only the start of the text was encoded
            more, text = "more than ", f", and one text of {longest} characters"
        raise PromptTooLongError(
            f"the prompt without history has {more}{len(prompts[turns])} tokens, over the limit of "
            f"{self.format.max_prompt_tokens}{text}; its parts (system text, examples, notes, current observation, "
            "instruction) are never cut: raise max_prompt_tokens or make them shorter (key "
            "data.init_args.prompt.max_prompt_tokens)"
        )

    def count_tokens(self, messages: list[Message], reply_follows: bool, tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of a conversation, with the header of the next reply if a reply follows."""
        return len(self._read(messages, generate=reply_follows, tools=tools))

    def continuation(self, rules: Rules, observation: Observation, closed: bool = True) -> tuple[Segment, ...]:
        """Render the segments after a reply in a growing sample: the end of the turn, the next message and header.

        Args:
            rules: texts of the environment, as at the start of the episode.
            observation: current observation.
            closed: whether the reply ended with the turn-close token. If not, that token is added as glue.

        Raises:
            RefusedMessagesError: the chat template refuses messages of these roles, or rewrites earlier messages when
                such messages follow.
            ValueError: the chat template is not append-only.
        """
        self._check_roles(rules, observation, later=True)
        tools, roles = self.writer.tools(rules.tools), _roles(observation)
        messages = self.writer.observed(observation, "", self.writer.instruction(rules.actions, observation))
        with self._refusing():
            suffix = self.template.suffix(self.writer.system(rules), messages, tools=tools)
        rewrites = self.template.rewriting(tools, roles)
        if observation.messages and (suffix is None or rewrites) and not self.template.rewriting(tools):
            raise RefusedMessagesError(f"{self.template.name} rewrites earlier messages if these follow")
        if suffix is None or rewrites:
            raise ValueError(f"{self.template.name} is not append-only, a growing sample cannot be built with it")
        glue = suffix[: len(suffix) - len(suffix.lstrip())]
        if not closed:
            close = self.template.turn_close
            suffix, glue = close + suffix, close + glue
        text, *rest = self.with_images(suffix, messages).chunks  # text up to the first image
        glue_ids = tuple(self.template.encode(glue))
        cut = len(glue_ids) if text.ids[: len(glue_ids)] == glue_ids else 0  # 0 if a token spans both parts
        observed = ModelInput((TextChunk(text.ids[cut:]), *rest))
        parts = ((SegmentKind.GLUE, ModelInput.of_ids(text.ids[:cut])), (SegmentKind.OBSERVATION, observed))
        return tuple(Segment(kind, part) for kind, part in parts if part)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply: the template's turn-close token, and the end-of-sequence token if the tokens differ."""
        eos = self.tokenizer.eos_token_id
        close = self.template.turn_close_id
        return (close,) if eos in (None, close) else (close, int(eos))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids without special tokens."""
        return self._short_reply(tuple(ids)) if len(ids) <= REMEMBERED_REPLY_TOKENS else self._decode(ids)

    def decode_with_markers(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids with special tokens, without the token that closes the reply."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        text = self.tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def tokens_before(self, ids: Sequence[int], chars: int) -> int:
        """Return the number of leading tokens of a reply within its first ``chars`` characters."""
        if not chars:
            return 0
        beyond = bisect_left(range(len(ids) + 1), True, key=lambda count: self._length(ids, count) > chars)
        return beyond - 1

    def _length(self, ids: Sequence[int], count: int) -> int:
        """Return the length of the text of the first ``count`` tokens, counting an incomplete character once.

        With byte fallback, each byte of an incomplete character decodes to a separate replacement character. So the
        length is computed where the character is complete, at most three tokens later.
        """
        shortest = sys.maxsize
        for end in range(count, min(count + UTF8_BYTES, len(ids) + 1)):
            text = self.decode(ids[:end])
            shortest = min(shortest, len(text))
            if not text.endswith("\ufffd"):
                break
        return shortest

    def _check_roles(self, rules: Rules, observation: Observation, later: bool) -> None:
        self.template.check_roles(_roles(observation), later, self.writer.tools(rules.tools))

    def _read(self, messages: list[Message], generate: bool, tools: Sequence[Tool] = ()) -> ModelInput:
        with self._refusing():
            text = self.template.apply(messages, generate, self.writer.tools(tools))
        return self.with_images(text, messages)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except TemplateError as error:
            raise RefusedMessagesError(f"{self.template.name} refuses the messages of a prompt: {error}") from error

    def with_images(self, text: str, messages: list[Message]) -> ModelInput:
        """Encode a text as a model input, and replace image placeholders by the images of the messages."""
        images = [image for message in messages for image in images_of(message)]
        if not images:
            return ModelInput.of_ids(self.template.encode(text))
        ids = self.template.encode(text)
        assert self.image_reader is not None, "images come from `see`"
        places = [place for place, one in enumerate(ids) if one == self.image_reader.placeholder]
        # Texts of environments are filtered and cannot contain a placeholder.
        if len(places) != len(images):
            raise ValueError(
                f"a prompt with {len(images)} images has {len(places)} image placeholders; remove them from the "
                "system text and the instruction (keys data.init_args.prompt.system and .instruction)"
            )
        parts: list[ModelInput] = []
        for start, end, image in zip([0, *(place + 1 for place in places)], places, images, strict=False):
            parts += [ModelInput.of_ids(ids[start:end]), image]
        return ModelInput.join([*parts, ModelInput.of_ids(ids[places[-1] + 1 :])])


def _shown(rules: Rules, observation: Observation, recollection: Recollection) -> Hashable:
    """Return everything that determines a prompt without tools, as a cache key."""
    past = [(t.observation, t.thought, t.action, t.role, t.images, t.messages) for t in recollection.turns]
    return (
        rules.system,
        tuple(rules.examples),
        tuple(rules.actions.items()),
        tuple(rules.places.items()),
        tuple(past),
        recollection.note,
        observation.text,
        observation.short_term,
        tuple(observation.images),
        observation.role,
        observation.messages,
        observation.instruction,
    )


def _roles(observation: Observation) -> list[str]:
    """Return the roles of the messages that show an observation."""
    return [role for role, _ in observation.messages] or [observation.role]


def shown(tokenizer: PreTrainedTokenizerBase, read: ModelInput) -> str:
    """Return a model input as text with special tokens; an image becomes ``[image of N tokens]``."""
    parts = []
    for chunk in read.chunks:
        if isinstance(chunk, ImageChunk):
            parts.append(f"[image of {chunk.tokens} tokens]")
        else:
            parts.append(str(tokenizer.decode(list(chunk.ids), clean_up_tokenization_spaces=False)))
    return "".join(parts)
