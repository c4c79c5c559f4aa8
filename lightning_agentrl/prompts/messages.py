"""Messages of a prompt, built from rules, observations and history in the format that the config sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_agentrl.prompts.memory import OwnMessages, PastTurn, Recollection
from lightning_agentrl.prompts.parser import split_reply
from lightning_agentrl.prompts.template import ChatTemplate, Message, Tool, Untrusted
from lightning_agentrl.types import ModelInput

INSTRUCTION_PLACES = ("actions",)
_BRACES = re.compile(r"\{\{|\}\}|\{(\w+)\}|\{[^{}\n]{0,40}\}?|\}")  # the last two alternatives match mistakes


@dataclass(frozen=True)
class PromptFormat:
    """Texts and limits of prompts.

    Args:
        think: whether to ask for a THINK line before the ACTION line; if False, a reply is only the action.
        instruction: text that ends the current user message, instead of the built-in one; empty: no instruction.
            ``{actions}`` stands for the names of the actions, ``{{`` and ``}}`` for braces.
        examples: whether to show the worked examples of the environment.
        system: system message, instead of the environment's; empty: no system message. ``{actions}`` stands for the
            actions with their descriptions, and any other name stands for the current value of the environment's
            text attribute with this name, such as ``{mission}``, ``{tips}`` or ``{achievements}``; ``{{`` and ``}}``
            stand for braces.
        max_prompt_tokens: largest number of tokens of a prompt, including images; the oldest history is dropped first.
        max_images: largest number of images of a prompt; None means no limit. The oldest history is dropped first.
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
        _check_places("system", self.system or "", None)
        _check_places("instruction", self.instruction or "", INSTRUCTION_PLACES)

    @property
    def places(self) -> list[str]:
        """Names of the placeholders in the system text, in order."""
        return list(dict.fromkeys(match[1] for match in _BRACES.finditer(self.system or "") if match[1]))

    def allows(self, prompt: ModelInput) -> bool:
        """Return whether a prompt is within the limits."""
        few = self.max_images is None or len(prompt.images) <= self.max_images
        return few and len(prompt) <= self.max_prompt_tokens


def filled(text: str, places: Mapping[str, str]) -> str:
    """Replace the placeholders in a text of the config by the texts in ``places``, and ``{{`` and ``}}`` by braces."""
    return _BRACES.sub(lambda match: places.get(match[1], "") if match[1] else match[0][0], text)


def _check_places(name: str, text: str, known: Sequence[str] | None) -> None:
    """Check the placeholders of a text.

    Args:
        name: config key of the text, for the error message.
        text: text to check.
        known: accepted names; None accepts any name.

    Raises:
        ValueError: braces surround a text that is not an accepted name.
    """
    for match in _BRACES.finditer(text):
        if match[0] not in ("{{", "}}") and (match[1] not in known if known is not None else not match[1]):
            allowed = "the name of an attribute of the environment, such as {mission}"
            if known is not None:
                allowed = f"one of {', '.join(f'{{{place}}}' for place in known)}"
            raise ValueError(
                f"the {name} text of the prompt contains '{match[0]}', but the text in braces must be {allowed}; write "
                f"{{{{ and }}}} for literal braces (key data.init_args.prompt.{name})"
            )


@dataclass(frozen=True)
class Rules:
    """Texts of an environment that every prompt shows.

    Args:
        system: rules and task. Descriptions of actions that this text lacks are listed below the text.
        examples: worked examples, pairs of an observation and a reply (an action name, or THINK and ACTION lines).
        actions: descriptions of the allowed actions by name.
        tools: functions that may be called, for the chat template.
        places: texts for the placeholders of the format's system text, by name.
    """

    system: str = ""
    examples: Sequence[tuple[str, str]] = ()
    actions: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[Tool] = ()
    places: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """The observation of one turn.

    Args:
        text: long-term text.
        short_term: text that only the current prompt shows.
        images: images from :meth:`ChatRenderer.see`.
        role: role of the message with the observation.
        messages: the environment's own messages, which replace text and images. Notes and short-term text are inserted
            at the start of the last message, the instruction at its end.
        call: next call of an environment that keeps its own history: new messages as in
            :mod:`lightning_agentrl.prompts.conversation`, the turn before these messages, and the limits of the reply.
        instruction: instruction that replaces the format's instruction; None keeps the format's.
    """

    text: str = ""
    short_term: str = ""
    images: Sequence[ModelInput] = ()
    role: str = "user"
    messages: OwnMessages = ()
    call: Mapping[str, Any] | None = None
    instruction: str | None = None


class MessageWriter:
    """Writer of the messages of prompts. Texts that look like special tokens are made harmless.

    Args:
        prompt_format: texts and limits of prompts.
        template: chat template, for the format of messages.
        safe: filter for text of environments and earlier replies.
        free_text: whether the whole reply is the action; then observations have no heading, and examples no format.
    """

    def __init__(
        self, prompt_format: PromptFormat, template: ChatTemplate, safe: Untrusted, free_text: bool = False
    ) -> None:
        self.format, self.template = prompt_format, template
        self.safe = safe
        self._heading = "" if free_text else "Observation:"
        self._whole_replies = free_text  # whether the whole reply is the action

    def parts(self, rules: Rules, observation: Observation, recollection: Recollection) -> dict[str, list[Message]]:
        """Return the messages of one turn by part, in order: ``system``, ``examples``, ``history``, ``current``."""
        examples = rules.examples if self.format.examples else ()
        instruction = self.instruction(rules.actions, observation)
        return {
            "system": self.system(rules),
            "examples": self.turns(_example_turn(text, reply, self._whole_replies) for text, reply in examples),
            "history": self.turns(recollection.turns),
            "current": self.observed(observation, recollection.note, instruction),
        }

    def system(self, rules: Rules) -> list[Message]:
        """Return a list with the system message, or an empty list if the system message has no text."""
        if self.format.system is not None:
            texts = {**rules.places, "actions": "\n".join(_listed(rules.actions))}
            text = filled(self.format.system, {name: self.safe(text) for name, text in texts.items()})
        else:
            listed = _listed({name: text for name, text in rules.actions.items() if text and text not in rules.system})
            text = self.safe("\n".join([rules.system, *(["Actions:"] if listed else []), *listed]).strip())
        return [self.template.message("system", text)] if text else []

    def turns(self, turns: Iterable[PastTurn]) -> list[Message]:
        """Return the messages of past turns, each with its reply."""
        messages = []
        for turn in turns:
            reply = self.safe(self.reply_text(turn.thought, turn.action))
            shown = Observation(turn.observation, images=turn.images, role=turn.role, messages=turn.messages)
            messages += [*self.observed(shown), self.template.message("assistant", reply)]
        return messages

    def observed(self, observation: Observation, note: str = "", instruction: str = "") -> list[Message]:
        """Return the messages of an observation; the last message also contains the note and the instruction."""
        if observation.messages:
            above = self.safe("\n".join(filter(None, (note, observation.short_term))))
            return self._own(observation, above, instruction)
        blank = not (observation.short_term or observation.text)
        heading = "" if observation.images and blank else self._heading
        shown = "\n".join(text for text in (heading, observation.short_term, observation.text) if text)
        text = self.safe(f"{note}\n\n{shown}" if note else shown)
        whole = f"{text}\n\n{instruction}" if instruction else text
        return [self.template.message(observation.role, whole, observation.images)]

    def _own(self, observation: Observation, above: str, below: str) -> list[Message]:
        """Return the environment's own messages, with ``above`` and ``below`` around the text of the last message."""
        left = iter(observation.images)
        messages = [
            (role, [next(left) if part is None else self.safe(part) for part in parts])
            for role, parts in observation.messages
        ]
        last = messages[-1][1]
        last[:0] = [f"{above}\n\n"] if above else []
        last[len(last) :] = [f"\n\n{below}"] if below else []
        return [self.template.mixed(role, parts) for role, parts in messages]

    def instruction(self, actions: Mapping[str, str], observation: Observation) -> str:
        """Return the text that ends the current user message."""
        if observation.instruction is not None:
            return observation.instruction
        names = self.safe(", ".join(actions))
        if self.format.instruction is not None:
            return filled(self.format.instruction, {"actions": names})
        if self.format.think:
            action = f"one of {names}" if names else "what you do"
            return f"Answer with two lines.\nTHINK: your reasoning, step by step\nACTION: {action}"
        return f"Answer with one of: {names}" if names else ""

    def reply_text(self, thought: str, action: str) -> str:
        """Return a past reply for the history, in the format that the instruction asks for."""
        if not self.format.think:
            return action
        return f"THINK: {thought}\nACTION: {action}" if thought else f"ACTION: {action}"

    def tools(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return a copy of the tools in which texts that look like special tokens are made harmless."""

        def harmless(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {self.safe(name): harmless(inner) for name, inner in value.items()}
            if isinstance(value, list | tuple):
                return [harmless(inner) for inner in value]
            return self.safe(value) if isinstance(value, str) else value

        return [harmless(tool) for tool in tools]


def _listed(actions: Mapping[str, str]) -> list[str]:
    """Return a line for each action."""
    return [f"- {name}: {text}" if text else f"- {name}" for name, text in actions.items()]


def _example_turn(observation: str, reply: str, whole: bool) -> PastTurn:
    """Return a worked example as a past turn; with ``whole``, the whole reply is the action."""
    thought, action, _ = ("", reply, 0) if whole else split_reply(reply)
    return PastTurn(observation, thought.strip(), action.strip())
