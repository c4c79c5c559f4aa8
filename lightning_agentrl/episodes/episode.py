"""Episodes as values: what continues one, and the pure function from an episode and an observation to a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning_agentrl.episodes.contract import Contract
from lightning_agentrl.prompts.conversation import conversations_of
from lightning_agentrl.prompts.memory import Memory, PastTurn, past_from_plain, past_to_plain
from lightning_agentrl.prompts.messages import Observation, Rules
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.types import ModelInput, Segment, SegmentKind, input_of
from lightning_agentrl.types.plain import (
    PixelTable,
    SavedPixels,
    builtin,
    inputs_from_plain,
    inputs_to_plain,
    segments_from_plain,
    segments_to_plain,
)

UNREAD = "Your last reply named no action."  # what the next prompt says after such a reply
SUMMARY = "Your summary of what came before:"


@dataclass(frozen=True)
class Prompt:
    """The next prompt of an episode: ``context`` was read before (growing samples only), ``new`` is added to it."""

    context: tuple[Segment, ...]
    new: tuple[Segment, ...]
    history_cuts: int
    observation: Observation = field(default_factory=Observation)  # as it is shown
    follows: int | None = -1  # turn whose reply the context ends with; None: it begins anew; -1: the last one

    @cached_property
    def input(self) -> ModelInput:
        return input_of((*self.context, *self.new))

    def as_segment(self) -> Segment:
        """Return everything as one prompt segment."""
        return Segment(SegmentKind.PROMPT, self.input)


@dataclass(frozen=True)
class Said:
    """A turn of an episode that brings its own history: what it added, and to which turn.

    Args:
        follows: number of that turn; None: it begins a conversation.
        messages: that were new, and last the reply, as in :mod:`lightning_agentrl.prompts.conversation`.
        images: of the messages.
        segments: that were read since the reply of that turn, or since the beginning, and last the reply.
        closed: the reply ended with the turn-close token.
    """

    follows: int | None
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[ModelInput, ...]
    segments: tuple[Segment, ...]
    closed: bool


@dataclass
class Episode:
    """An episode so far. With an environment in which its actions are replayed, it can be continued from here."""

    number: int  # among the episodes of its session
    seed: int
    turns_taken: int = 0  # by the session, also in earlier episodes: seeds of replies follow from it
    running: bool = True
    actions: list[str] = field(default_factory=list)  # that the environment took
    past: list[PastTurn] = field(default_factory=list)
    context: tuple[Segment, ...] = ()  # all that was read and sampled, if the episode is one growing sample
    reply_closed: bool = True  # the last sampled reply ended with the turn-close token
    env_return: float = 0.0
    reply_tokens: int = 0
    unread: int = 0  # replies to the current observation that named no action
    asked_again: int = 0  # replies of the whole episode that named no action and were asked for again
    said: list[Said] = field(default_factory=list)  # turns, if the environment brings its own history
    summary: str = ""  # that the policy wrote last
    summarized: int = 0  # past turns that it stands for
    summaries: int = 0  # turns in which one was written

    @property
    def turn(self) -> int:
        """The number of the next turn."""
        return len(self.past) + self.asked_again + len(self.said) + self.summaries

    def conversation(self, turn: int | None) -> Iterator[Said]:
        """Yield the turns from the beginning of a conversation to the reply of one of them."""
        turns = []
        while turn is not None:
            turns.append(self.said[turn])
            turn = self.said[turn].follows
        return reversed(turns)

    def copy(self) -> Episode:
        """Return a copy that does not grow with the episode."""
        return replace(self, actions=list(self.actions), past=list(self.past), said=list(self.said))

    def state_dict(self, images: PixelTable) -> dict[str, Any]:
        """Return the episode as plain types, with the pixels of its images added to the table."""
        return vars(self) | {
            "actions": list(map(builtin, self.actions)),
            "past": [past_to_plain(turn, images) for turn in self.past],
            "context": segments_to_plain(self.context, images),
            "said": [
                {
                    **vars(turn),
                    "messages": [json.dumps(message) for message in turn.messages],
                    "images": inputs_to_plain(turn.images, images),
                    "segments": segments_to_plain(turn.segments, images),
                }
                for turn in self.said
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], images: SavedPixels) -> Episode:
        """Undo :meth:`state_dict`."""
        past = [past_from_plain(turn, images) for turn in state["past"]]
        context = segments_from_plain(state["context"], images)
        said = [
            Said(
                turn["follows"],
                tuple(json.loads(message) for message in turn["messages"]),
                inputs_from_plain(turn["images"], images),
                segments_from_plain(turn["segments"], images),
                turn["closed"],
            )
            for turn in state["said"]
        ]
        return cls(**{**state, "actions": list(state["actions"]), "past": past, "context": context, "said": said})


@dataclass(frozen=True)
class Moment:
    """The state of a session before one of its turns, from which the episode can be played on."""

    index: int  # of the session
    first_episode: int
    episode: Episode  # a copy
    fingerprint: str  # of the observation
    prompt: ModelInput

    @property
    def key(self) -> tuple[int, int, int]:
        return self.index, self.episode.number, self.episode.turn


def rules_of(contract: Contract) -> Rules:
    """Return the part of a contract that every prompt shows."""
    return Rules(contract.system_prompt, contract.examples, contract.actions, contract.tool_schemas, contract.places)


def make_prompt(
    episode: Episode, observation: Observation, contract: Contract, renderer: ChatRenderer, memory: Memory
) -> Prompt:
    """Return the prompt for an observation that follows an episode.

    Raises:
        PromptTooLongError: even without history it is over its limit.
        RefusedMessagesError: the chat template does not show the environment's own messages.
    """
    if observation.call is not None:
        return _prompt_of_call(episode, observation, contract, renderer)
    short_term = observation.short_term
    if episode.unread:
        short_term = f"{UNREAD}\n{short_term}".strip()
    past = episode.past[episode.summarized :]  # a copy, which a memory may change
    follows = past or (episode.asked_again and memory.grows)  # other memories show no unread reply
    role = contract.observation_role if follows else "user"
    shown = replace(observation, short_term=short_term, role=role)
    if episode.context:
        new = renderer.continuation(rules_of(contract), shown, episode.reply_closed)
        return Prompt(episode.context, new, 0, shown)
    recollection = memory.recall(past)
    if episode.summary:
        note = "\n".join(filter(None, (SUMMARY, episode.summary, recollection.note)))
        recollection = replace(recollection, note=note)
    rendered = renderer.render(rules_of(contract), shown, recollection)
    return Prompt((), rendered.segments, rendered.history_cuts, shown, None if episode.summaries else -1)


def _prompt_of_call(episode: Episode, observation: Observation, contract: Contract, renderer: ChatRenderer) -> Prompt:
    """Return the prompt of a call: earlier ids plus the new messages if they continue them, else all rendered again.

    It begins anew where it follows no turn, or the template rewrites what came before.
    """
    call, chat, tools = observation.call, conversations_of(renderer), contract.tool_schemas
    assert call is not None
    before = list(episode.conversation(call["follows"]))
    images = tuple(observation.images)
    if before:
        new = chat.added(call["messages"], images, tools, before[-1].closed)
        if new is not None:
            context = tuple(segment for turn in before for segment in turn.segments)
            return Prompt(context, new, 0, observation, call["follows"])
    messages = [message for turn in before for message in turn.messages]
    whole = chat.whole([*messages, *call["messages"]], [i for turn in before for i in turn.images] + [*images], tools)
    return Prompt((), (whole,), 0, observation, None)
