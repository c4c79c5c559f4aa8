"""What is said in a prompt: rules and observations of an environment, and the words of the config, as messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from lightning_agentrl.prompts.format import PromptFormat, filled
from lightning_agentrl.prompts.memory import OwnMessages, PastTurn, Recollection
from lightning_agentrl.prompts.parser import split_reply
from lightning_agentrl.prompts.template import ChatTemplate, Message, Tool
from lightning_agentrl.prompts.untrusted import Untrusted
from lightning_agentrl.types import ModelInput

REMEMBERED_RULES, REMEMBERED_RULES_CHARS = 64, 1 << 14  # texts of rules, and what they are made of
Pairs = tuple[tuple[str, str], ...]  # of a mapping, which can be remembered


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


class MessageWriter:
    """A writer of the messages of prompts, in which no text of an environment passes for a special token.

    Args:
        prompt_format: the wording.
        template: in whose form messages are written.
        safe: filter for text of environments and earlier replies.
        free_text: for environments that take the whole reply: observations get no heading, examples no format.
    """

    def __init__(
        self, prompt_format: PromptFormat, template: ChatTemplate, safe: Untrusted, free_text: bool = False
    ) -> None:
        self.format, self.template = prompt_format, template
        self._safe = safe
        self._heading = "" if free_text else "Observation:"
        self._whole_replies = free_text  # a reply is the action
        self._rules = lru_cache(REMEMBERED_RULES)(self._rules_text)  # the same at every turn, or nearly

    def parts(self, rules: Rules, observation: Observation, recollection: Recollection) -> dict[str, list[Message]]:
        """Return the messages of one turn by part, in order: ``system``, ``examples``, ``history``, ``current``."""
        examples = rules.examples if self.format.examples else ()
        instruction = self.instruction(rules.actions)
        return {
            "system": self.system(rules),
            "examples": self.turns(_example_turn(text, reply, self._whole_replies) for text, reply in examples),
            "history": self.turns(recollection.turns),
            "current": self.observed(observation, recollection.note, instruction),
        }

    def system(self, rules: Rules) -> list[Message]:
        """Return the system message, or nothing where there is no text for one."""
        chars = len(rules.system) + sum(map(len, rules.actions.values())) + sum(map(len, rules.places.values()))
        write = self._rules if chars <= REMEMBERED_RULES_CHARS else self._rules_text
        text = write(rules.system, tuple(rules.actions.items()), tuple(rules.places.items()))
        return [self.template.message("system", text)] if text else []

    def _rules_text(self, system: str, actions: Pairs, places: Pairs) -> str:
        if self.format.system is not None:
            texts = {**dict(places), "actions": "\n".join(_listed(dict(actions)))}
            return filled(self.format.system, {name: self._safe(text) for name, text in texts.items()})
        listed = _listed({name: text for name, text in actions if text and text not in system})
        return self._safe("\n".join([system, *(["Actions:"] if listed else []), *listed]).strip())

    def turns(self, turns: Iterable[PastTurn]) -> list[Message]:
        """Return past turns, each with its reply."""
        messages = []
        for turn in turns:
            reply = self._safe(self.reply_text(turn.thought, turn.action))
            shown = Observation(turn.observation, images=turn.images, role=turn.role, messages=turn.messages)
            messages += [*self.observed(shown), self.template.message("assistant", reply)]
        return messages

    def observed(self, observation: Observation, note: str = "", instruction: str = "") -> list[Message]:
        """Return the messages of an observation, with what else belongs to its turn in the last one."""
        if observation.messages:
            above = self._safe("\n".join(filter(None, (note, observation.short_term))))
            return self._own(observation, above, instruction)
        blank = not (observation.short_term or observation.text)
        heading = "" if observation.images and blank else self._heading
        shown = "\n".join(text for text in (heading, observation.short_term, observation.text) if text)
        text = self._safe(f"{note}\n\n{shown}" if note else shown)
        whole = f"{text}\n\n{instruction}" if instruction else text
        return [self.template.message(observation.role, whole, observation.images)]

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

    def instruction(self, actions: Mapping[str, str]) -> str:
        """Return the text that ends the current user message."""
        names = self._safe(", ".join(actions))
        if self.format.instruction is not None:
            return filled(self.format.instruction, {"actions": names})
        if self.format.think:
            action = f"one of {names}" if names else "what you do"
            return f"Answer with two lines.\nTHINK: your reasoning, step by step\nACTION: {action}"
        return f"Answer with one of: {names}" if names else ""

    def reply_text(self, thought: str, action: str) -> str:
        """Return a past reply as the history shows it, in the format that the instruction asks for."""
        if not self.format.think:
            return action
        return f"THINK: {thought}\nACTION: {action}" if thought else f"ACTION: {action}"

    def tools(self, tools: Sequence[Tool]) -> list[Tool]:
        """Return tools whose names and descriptions cannot pass for special tokens; what is called stays as it was."""

        def harmless(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {self._safe(name): harmless(inner) for name, inner in value.items()}
            if isinstance(value, list | tuple):
                return [harmless(inner) for inner in value]
            return self._safe(value) if isinstance(value, str) else value

        return [harmless(tool) for tool in tools]


def _listed(actions: Mapping[str, str]) -> list[str]:
    """Return a line for each action."""
    return [f"- {name}: {text}" if text else f"- {name}" for name, text in actions.items()]


def _example_turn(observation: str, reply: str, whole: bool) -> PastTurn:
    """Return a worked example as a turn; its whole reply may be the action."""
    thought, action, _ = ("", reply, 0) if whole else split_reply(reply)
    return PastTurn(observation, thought.strip(), action.strip())
