"""Chat rendering: what the environment says, as the tokens the policy reads."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from lightning_agentrl.errors.names import closest
from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.prompts.memory import OwnMessages, PastTurn, Recollection
from lightning_agentrl.prompts.parser import split_reply
from lightning_agentrl.prompts.template import ChatTemplate, Message, RefusedMessagesError, Tool, images_of
from lightning_agentrl.prompts.untrusted import Untrusted
from lightning_agentrl.types import ModelInput, Segment, SegmentKind
from lightning_agentrl.types.model_input import ImageReader, TextChunk

PLACES = ("mission", "actions", "tips")  # what a system text of the config may take from the environment
REMEMBERED, REMEMBERED_CHARS = 1024, 1024  # prompts, and their length: some ten megabytes at most, 40 bytes an id
REMEMBERED_REPLY_TOKENS = 16  # the most in a reply of which the text is remembered
REMEMBERED_RULES, REMEMBERED_RULES_CHARS = 64, 1 << 14  # texts of rules, and what they are made of
Pairs = tuple[tuple[str, str], ...]  # of a mapping, which can be remembered
_PLACE = re.compile(rf"\{{({'|'.join(PLACES)})\}}")


@dataclass(frozen=True)
class PromptFormat:
    """The wording of prompts.

    Args:
        think: ask for a THINK line before the ACTION line; otherwise a reply is the action alone.
        instruction: text that ends the current user message in place of the built-in one. ``{actions}`` in it stands
            for the names of the actions; an empty text omits the instruction.
        examples: show the worked examples of the environment.
        system: system message in place of the environment's; an empty text omits the message. In it ``{mission}``,
            ``{actions}`` and ``{tips}`` stand for what the environment says: the mission of the episode, the actions
            with their descriptions, and its hints.
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
        for name in re.findall(r"\{(\w+)\}", self.system or ""):
            if name not in PLACES and (meant := closest(name, PLACES, cutoff=0.85)):
                raise ValueError(
                    f"the system text has {{{name}}}, which stands for nothing; did you mean {{{meant}}}? (key "
                    "data.init_args.prompt.system)"
                )

    @property
    def places(self) -> list[str]:
        """What the system text takes from the environment."""
        return [name for name in PLACES if f"{{{name}}}" in (self.system or "")]

    def allows(self, prompt: ModelInput) -> bool:
        """Return whether a prompt is within the limits."""
        few = self.max_images is None or len(prompt.images) <= self.max_images
        return few and len(prompt) <= self.max_prompt_tokens


@dataclass(frozen=True)
class Rules:
    """What an environment says in every prompt.

    Args:
        system: rules and task. Descriptions of actions that it lacks are listed below it.
        examples: worked examples: an observation and a reply, an action name or THINK and ACTION lines.
        actions: names of the allowed actions and their descriptions.
        tools: functions that may be called, for the chat template.
        places: texts for the places of the format's system text, by name.
    """

    system: str = ""
    examples: Sequence[tuple[str, str]] = ()
    actions: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    places: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def as_pairs(self) -> tuple[Pairs, Pairs, Pairs]:
        """Examples, actions and places in a form that can be remembered."""
        examples = tuple([(text, reply) for text, reply in self.examples])
        return examples, tuple(self.actions.items()), tuple(self.places.items())

    @cached_property
    def chars(self) -> int:
        """Characters of all but names and tools."""
        said = [self.system, *self.actions.values(), *self.places.values()]
        return sum(map(len, [*said, *(text for example in self.examples for text in example)]))


@dataclass(frozen=True)
class Observation:
    """What an environment shows in one turn.

    Args:
        text: long-term text.
        short_term: text that is shown now and never again.
        images: from :meth:`ChatRenderer.see`.
        role: of the message with it.
        messages: of the environment's own, which show text and images in its place. Notes and short-term text come at
            the start of the last one, the instruction at its end.
    """

    text: str = ""
    short_term: str = ""
    images: Sequence[ModelInput] = ()
    role: str = "user"
    messages: OwnMessages = ()


class _Texts(NamedTuple):
    """All that a prompt of texts alone is made of, in a form that can be remembered."""

    system: str
    examples: Pairs
    actions: Pairs
    places: Pairs
    past: tuple[PastTurn, ...]
    note: str
    text: str
    short_term: str
    role: str


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
        ValueError: the template cannot render an agent's conversation; see :class:`ChatTemplate`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_format: PromptFormat | None = None,
        image_reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.format = prompt_format or PromptFormat()
        self.image_reader = image_reader
        self.template = ChatTemplate(tokenizer, image_reader)
        self._heading = "Observation:"
        self._whole_replies = False  # a reply is the action
        # A text of so many characters is over the limit of tokens, whatever it says; megabytes are never encoded.
        longest = max(map(len, tokenizer.get_vocab()))
        most = longest * (self.format.max_prompt_tokens + 1)
        self._safe = Untrusted(tokenizer, self.template.markers, max_chars=most)
        # States recur. What the config adds to every prompt counts for its length.
        self._remembered = lru_cache(REMEMBERED)(self._of_texts)
        self._most_chars = REMEMBERED_CHARS - len(self.format.system or "") - len(self.format.instruction or "")
        self._rules = lru_cache(REMEMBERED_RULES)(self._rules_text)  # the same at every turn, or nearly
        self._reply = lru_cache(REMEMBERED)(self._decoded)  # an action and little else

    @cached_property
    def free_text(self) -> ChatRenderer:
        """A renderer for environments that take the whole reply: it asks for no thought and adds no headings."""
        other = copy(self)
        other.format, other._heading, other._whole_replies = replace(self.format, think=False), "", True
        other._remembered = lru_cache(REMEMBERED)(other._of_texts)
        other._rules = lru_cache(REMEMBERED_RULES)(other._rules_text)
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
        self, rules: Rules, observation: Observation, recollection: Recollection | None = None
    ) -> RenderedPrompt:
        """Return the prompt of one turn as one segment.

        Args:
            rules: what the environment says in every prompt.
            observation: what it shows now.
            recollection: what the memory shows of the episode; None: nothing.

        Raises:
            RefusedMessagesError: the template does not show messages of these roles.
            PromptTooLongError: the prompt is over its limit even without any history.
        """
        recollection = recollection or Recollection()
        past = recollection.turns
        self._check_roles(observation, later=bool(past))
        if (texts := self._as_texts(rules, observation, recollection)) is not None:
            return self._remembered(texts)
        parts = self.messages(rules, observation, Recollection(note=recollection.note))
        return self._fitted(parts, past, len(observation.images), rules.tools)

    def _as_texts(self, rules: Rules, observation: Observation, recollection: Recollection) -> _Texts | None:
        """Return what a prompt is made of, if that is texts alone, and few enough of them to be remembered."""
        past = recollection.turns
        if observation.images or rules.tools or observation.messages or any(t.images or t.messages for t in past):
            return None
        said = [recollection.note, observation.text, observation.short_term]
        said += [text for turn in past for text in (turn.observation, turn.thought, turn.action)]
        if rules.chars + sum(map(len, said)) > self._most_chars:
            return None
        return _Texts(
            rules.system,
            *rules.as_pairs,
            tuple([PastTurn(turn.observation, turn.thought, turn.action, role=turn.role) for turn in past]),
            recollection.note,
            observation.text,
            observation.short_term,
            observation.role,
        )

    def _of_texts(self, texts: _Texts) -> RenderedPrompt:
        rules = Rules(texts.system, texts.examples, dict(texts.actions), places=dict(texts.places))
        observation = Observation(texts.text, texts.short_term, role=texts.role)
        return self._fitted(self.messages(rules, observation, Recollection(note=texts.note)), texts.past)

    def _fitted(
        self, parts: Mapping[str, list[Message]], past: Sequence[PastTurn], images: int = 0, tools: Sequence[Tool] = ()
    ) -> RenderedPrompt:
        """Return the prompt of these parts, as in :meth:`messages`, with as much of the past as fits."""
        head, current = parts["system"] + parts["examples"], parts["current"]
        prompts: dict[int, ModelInput] = {}

        def fits(cuts: int) -> bool:
            prompts[cuts] = self._read(head + self._turns(past[cuts:]) + current, generate=True, tools=tools)
            return self.format.allows(prompts[cuts])

        turns = len(past)
        cuts = 0 if fits(0) else bisect_left(range(turns + 1), True, lo=1, key=fits)
        if cuts > turns:
            if len(prompts[turns]) <= self.format.max_prompt_tokens:
                raise PromptTooLongError(
                    f"one observation shows {images} images, over the limit of {self.format.max_images}; raise it "
                    "(key data.init_args.prompt.max_images)"
                )
            raise PromptTooLongError(
                f"the prompt without history has {len(prompts[turns])} tokens, over the limit of "
                f"{self.format.max_prompt_tokens}; its parts (system text, examples, notes, current observation, "
                "instruction) are never cut: raise max_prompt_tokens or make them shorter (key "
                "data.init_args.prompt.max_prompt_tokens)"
            )
        return RenderedPrompt((Segment(SegmentKind.PROMPT, prompts[cuts]),), cuts)

    def messages(self, rules: Rules, observation: Observation, recollection: Recollection) -> dict[str, list[Message]]:
        """Return the messages of one turn by part, in order: ``system``, ``examples``, ``history``, ``current``."""
        examples = rules.examples if self.format.examples else ()
        instruction = self._instruction(rules.actions)
        return {
            "system": self._system(rules),
            "examples": self._turns(_example_turn(text, reply, self._whole_replies) for text, reply in examples),
            "history": self._turns(recollection.turns),
            "current": self._observed(observation, recollection.note, instruction),
        }

    def count_tokens(self, messages: list[Message], reply_follows: bool, tools: Sequence[Tool] = ()) -> int:
        """Return the number of tokens of a conversation, with the header of the next reply if one follows."""
        return len(self._read(messages, generate=reply_follows, tools=tools))

    def continuation(self, rules: Rules, observation: Observation, closed: bool = True) -> tuple[Segment, ...]:
        """Return what follows a reply in a growing sample: the rest of its turn, the next message, the next header.

        Args:
            rules: as at the start of the episode.
            observation: what the environment shows now.
            closed: whether the reply ended with the token that closes a turn. Otherwise the close comes first, as glue.

        Raises:
            RefusedMessagesError: the template does not show messages of these roles, or rewrites earlier ones where it
                does.
            ValueError: the template is not append-only.
        """
        self._check_roles(observation, later=True)
        messages = self._observed(observation, "", self._instruction(rules.actions))
        with self._refusing():
            suffix = self.template.suffix(self._system(rules), messages, tools=self._tools(rules.tools))
        if observation.messages and suffix is None and not self.template.rewrites:
            raise RefusedMessagesError(f"{self.template.name} rewrites earlier messages where it shows these")
        if suffix is None or self.template.rewrites:
            raise ValueError(f"{self.template.name} is not append-only, a growing sample cannot be built with it")
        glue = suffix[: len(suffix) - len(suffix.lstrip())]
        if not closed:
            close = self.template.turn_close
            suffix, glue = close + suffix, close + glue
        text, *rest = self._with_images(suffix, messages).chunks  # before the first image
        glue_ids = tuple(self.template.encode(glue))
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
        close = self.template.turn_close_id
        return (close,) if eos in (None, close) else (close, int(eos))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids without special tokens."""
        return self._reply(tuple(ids)) if len(ids) <= REMEMBERED_REPLY_TOKENS else self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def tokens_before(self, ids: Sequence[int], chars: int) -> int:
        """Return how many leading tokens of a reply lie within its first ``chars`` characters."""
        if not chars:
            return 0
        beyond = bisect_left(range(len(ids) + 1), True, key=lambda count: len(self.decode(ids[:count])) > chars)
        return beyond - 1

    # Messages

    def _system(self, rules: Rules) -> list[Message]:
        chars = len(rules.system) + sum(map(len, rules.actions.values())) + sum(map(len, rules.places.values()))
        write = self._rules if chars <= REMEMBERED_RULES_CHARS else self._rules_text
        text = write(rules.system, tuple(rules.actions.items()), tuple(rules.places.items()))
        return [self.message("system", text)] if text else []

    def _rules_text(self, system: str, actions: Pairs, places: Pairs) -> str:
        if self.format.system is not None:
            texts = {**dict(places), "actions": "\n".join(_listed(dict(actions)))}
            return _PLACE.sub(lambda place: self._safe(texts.get(place[1], "")), self.format.system)
        listed = _listed({name: text for name, text in actions if text and text not in system})
        return self._safe("\n".join([system, *(["Actions:"] if listed else []), *listed]).strip())

    def _tools(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return tools whose names and descriptions cannot pass for special tokens; what is called stays as it was."""

        def harmless(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {self._safe(name): harmless(inner) for name, inner in value.items()}
            if isinstance(value, list | tuple):
                return [harmless(inner) for inner in value]
            return self._safe(value) if isinstance(value, str) else value

        return [harmless(tool) for tool in tools]

    def _turns(self, turns: Iterable[PastTurn]) -> list[Message]:
        messages = []
        for turn in turns:
            reply = self._safe(self.reply_text(turn.thought, turn.action))
            shown = Observation(turn.observation, images=turn.images, role=turn.role, messages=turn.messages)
            messages += [*self._observed(shown), self.message("assistant", reply)]
        return messages

    def _observed(self, observation: Observation, note: str = "", instruction: str = "") -> list[Message]:
        """Return the messages of an observation, with what else belongs to its turn in the last one."""
        if observation.messages:
            above = self._safe("\n".join(filter(None, (note, observation.short_term))))
            return self._own(observation, above, instruction)
        blank = not (observation.short_term or observation.text)
        heading = "" if observation.images and blank else self._heading
        shown = "\n".join(text for text in (heading, observation.short_term, observation.text) if text)
        text = self._safe(f"{note}\n\n{shown}" if note else shown)
        whole = f"{text}\n\n{instruction}" if instruction else text
        return [self.message(observation.role, whole, observation.images)]

    def _check_roles(self, observation: Observation, later: bool) -> None:
        roles = [role for role, _ in observation.messages] or [observation.role]
        if roles != ["user"]:  # which every template shows
            self.template.check_roles(roles, later)

    def _own(self, observation: Observation, above: str, below: str) -> list[Message]:
        """Return the environment's own messages, with texts at the start and at the end of the last one."""
        left = iter(observation.images)
        messages = [
            (role, [next(left) if part is None else self._safe(part) for part in parts])
            for role, parts in observation.messages
        ]
        last = messages[-1][1]
        last[:0] = [f"{above}\n\n"] if above else []
        last[len(last) :] = [f"\n\n{below}"] if below else []
        return [self.template.mixed(role, parts) for role, parts in messages]

    def message(self, role: str, text: str, images: Sequence[ModelInput] = ()) -> Message:
        """Return a message in the form that the template reads."""
        return self.template.message(role, text, images)

    def _instruction(self, actions: Mapping[str, str]) -> str:
        names = self._safe(", ".join(actions))
        if self.format.instruction is not None:
            return self.format.instruction.replace("{actions}", names)
        if self.format.think:
            action = f"one of {names}" if names else "what you do"
            return f"Answer with two lines.\nTHINK: your reasoning, step by step\nACTION: {action}"
        return f"Answer with one of: {names}" if names else ""

    def _read(self, messages: list[Message], generate: bool, tools: Sequence[Tool] = ()) -> ModelInput:
        with self._refusing():
            text = self.template.apply(messages, generate, self._tools(tools))
        return self._with_images(text, messages)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except TemplateError as error:
            raise RefusedMessagesError(f"{self.template.name} refuses the messages of a prompt: {error}") from error

    def _with_images(self, text: str, messages: list[Message]) -> ModelInput:
        """Return the text as a model input, with the images of the messages in place of their placeholders."""
        images = [image for message in messages for image in images_of(message)]
        if not images:
            return ModelInput.of_ids(self.template.encode(text))
        ids = self.template.encode(text)
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


def _listed(actions: Mapping[str, str]) -> list[str]:
    """Return a line for each action."""
    return [f"- {name}: {text}" if text else f"- {name}" for name, text in actions.items()]


def _example_turn(observation: str, reply: str, whole: bool) -> PastTurn:
    """Return a worked example as a turn; its whole reply may be the action."""
    thought, action, _ = ("", reply, 0) if whole else split_reply(reply)
    return PastTurn(observation, thought.strip(), action.strip())
