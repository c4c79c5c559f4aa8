"""State of an episode, and the pure function from an episode and an observation to a prompt."""

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

UNREAD = "Your last reply named no action."  # shown in the next prompt after such a reply
SUMMARY = "Your summary of what came before:"


@dataclass(frozen=True)
class Prompt:
    """The next prompt of an episode: ``context`` from the last prompt (growing samples only), then ``new``."""

    context: tuple[Segment, ...]
    new: tuple[Segment, ...]
    history_cuts: int  # number of past turns that were left out to stay within the limits
    observation: Observation = field(default_factory=Observation)  # observation as shown in the prompt
    follows: int | None = -1  # turn whose reply ends the context; -1: the last turn; None: a new conversation

    @cached_property
    def input(self) -> ModelInput:
        return input_of((*self.context, *self.new))

    def as_segment(self) -> Segment:
        """Return everything as one prompt segment."""
        return Segment(SegmentKind.PROMPT, self.input)


@dataclass(frozen=True)
class Said:
    """A turn in an environment that keeps its own history: the messages that the turn added to an earlier turn.

    Args:
        follows: index of the earlier turn; None if the turn begins a conversation.
        messages: new messages, which end with the reply, as in :mod:`lightning_agentrl.prompts.conversation`.
        images: images of the messages.
        segments: segments after the earlier turn's reply, or all segments of a new conversation, up to this reply.
        closed: whether the reply ended with the turn-close token.
    """

    follows: int | None
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[ModelInput, ...]
    segments: tuple[Segment, ...]
    closed: bool


@dataclass
class Episode:
    """State of an episode, which can be continued in an environment in which the episode's actions were replayed."""

    number: int  # index among the episodes of its session
    seed: int
    turns_taken: int = 0  # turns of the session, including earlier episodes; the seeds of replies depend on it
    running: bool = True
    actions: list[str] = field(default_factory=list)  # executed actions
    past: list[PastTurn] = field(default_factory=list)
    context: tuple[Segment, ...] = ()  # all prompts and replies so far, if the episode is one growing sample
    reply_closed: bool = True  # whether the last reply ended with the turn-close token
    env_return: float = 0.0
    reply_tokens: int = 0
    unread: int = 0  # number of replies to the current observation that named no action
    asked_again: int = 0  # number of replies of the episode after which a new reply was requested
    said: list[Said] = field(default_factory=list)  # turns, if the environment keeps its own history
    summary: str = ""  # last summary of the policy
    summarized: int = 0  # number of past turns that the summary replaces
    summaries: int = 0  # number of turns in which a summary was written

    @property
    def turn(self) -> int:
        """The index of the next turn."""
        return len(self.past) + self.asked_again + len(self.said) + self.summaries

    def conversation(self, turn: int | None) -> Iterator[Said]:
        """Yield the turns of a conversation from its beginning to the given turn; None yields no turns."""
        turns = []
        while turn is not None:
            turns.append(self.said[turn])
            turn = self.said[turn].follows
        return reversed(turns)

    def copy(self) -> Episode:
        """Return a copy that does not change with the episode."""
        return replace(self, actions=list(self.actions), past=list(self.past), said=list(self.said))

    def state_dict(self, images: PixelTable) -> dict[str, Any]:
        """Serialize the episode to plain types; the pixels of its images are added to the table ``images``."""
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
        """Restore an episode from :meth:`state_dict`."""
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
    """State of a session before one of its turns, from which the episode can be continued."""

    index: int  # index of the session
    first_episode: int
    episode: Episode  # a copy
    fingerprint: str  # fingerprint of the observation
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
    """Return the prompt for the current observation of an episode.

    Raises:
        PromptTooLongError: the prompt exceeds its limit even without history.
        RefusedMessagesError: the chat template cannot render the environment's own messages.
    """
    if observation.call is not None:
        return _prompt_of_call(episode, observation, contract, renderer)
    short_term = observation.short_term
    if episode.unread:
        short_term = f"{UNREAD}\n{short_term}".strip()
    past = episode.past[episode.summarized :]  # a copy, since a memory may change the list
    follows = past or (episode.asked_again and memory.grows)  # other memories do not show replies without an action
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
    """Return the prompt of a call: the earlier token ids plus the new messages, or all messages rendered again.

    All messages are rendered again if the call follows no turn, or if the chat template rewrites earlier messages.
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
