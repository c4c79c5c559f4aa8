"""Segments, turns and samples: the prompts of the policy, its replies, and their results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from lightning_agentrl.types.model_input import ModelInput, Row
from lightning_agentrl.types.rounding import CANCELLED


class SegmentKind(StrEnum):
    """Origin of a run of tokens."""

    PROMPT = "prompt"  # tokens before the first sampled token of a sample
    ACTION = "action"  # tokens that the policy has sampled
    OBSERVATION = "observation"  # tokens from the environment, between two actions of one sample
    GLUE = "glue"  # template tokens, which were not sampled


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind.

    Args:
        kind: origin of the tokens.
        input: the tokens, at least one; actions have no images.
        logps: the engine's log-probs of the tokens of an action; empty for other kinds.

    Raises:
        ValueError: there are no tokens, or the number of log-probs of an action is wrong.
    """

    kind: SegmentKind
    input: ModelInput
    logps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.input:
            raise ValueError(f"a segment of kind '{self.kind}' needs at least one token id")
        if self.kind is SegmentKind.ACTION and len(self.logps) != len(self.input):
            raise ValueError(
                f"an action segment of {len(self.input)} ids needs as many log-probs, got {len(self.logps)}"
            )

    def __len__(self) -> int:
        return len(self.input)

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids, see :attr:`ModelInput.ids`."""
        return self.input.ids

    @property
    def is_action(self) -> bool:
        return self.kind is SegmentKind.ACTION


def input_of(segments: Iterable[Segment]) -> ModelInput:
    """Return the concatenated model input of segments."""
    return ModelInput.join([segment.input for segment in segments])


@dataclass(frozen=True)
class ForkPlan:
    """Settings of branches: continuations of episodes from states of the rollout.

    Args:
        branches: number of branches from each chosen state.
        every: branches start before each turn whose index is a multiple of ``every``, and before the first turn of each
            episode in a rollout.
        gamma: discount from turn to turn in the return of a branch.
    """

    branches: int
    every: int
    gamma: float

    def __post_init__(self) -> None:
        for name in ("branches", "every"):
            if (given := getattr(self, name)) < 1:
                raise ValueError(f"forks need {name} of at least 1, got {given}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"forks need a gamma between 0 and 1, got {self.gamma}")


LATE = "late"  # error of a turn: its environment exceeded its time, so the other environments continued


class StopReason(StrEnum):
    """Why an episode ended."""

    ENV_DONE = "env_done"  # the environment returned terminated
    ENV_TRUNCATED = "env_truncated"  # the environment returned truncated (its time limit)
    MAX_TURNS = "max_turns"  # the episode reached the interaction's limit of turns
    INVALID_ACTION = "invalid_action"  # the episode was truncated because the reply was invalid
    CONTEXT_LENGTH = "context_length"  # the next prompt does not fit into the context
    REPLY_BUDGET = "reply_budget"  # the replies of the episode have used up their token budget
    ENV_FAULT = "env_fault"  # the environment failed after this turn, and retries failed, too


@dataclass(frozen=True, slots=True)
class Turn:
    """One observation, the policy's reply to it, and the result.

    ``bootstrap`` is the prompt of the state *after* this turn, from which nothing is sampled. ``bootstrap`` is set
    where the value recursion may be cut: at the last turn of a rollout, and at a truncated turn, whose ``bootstrap``
    contains the final observation of the episode. A terminated turn never has a ``bootstrap``.
    """

    env: int  # index of the environment over all ranks
    episode: int  # index of the episode within the environment
    index: int  # index of the turn within the episode, from 0
    observation: str  # whole text of the observation, including parts that later prompts omit
    reply: str
    thought: str
    action: str  # the action that was executed
    valid: bool  # False: the reply named no action and the default action ran, or the environment refused the action
    env_reward: float
    reward: float  # environment reward, minus the penalty for an invalid reply, plus a judge's score
    episode_return: float  # sum of environment rewards of the episode up to and including this turn
    terminated: bool
    truncated: bool
    stop: StopReason | None  # None while the episode is running
    success: bool | None  # whether the environment reports success; None: not reported
    hit_token_cap: bool  # whether the reply was cut by the per-turn token cap
    history_cuts: int  # number of earlier turns omitted because the prompt exceeded its limit
    policy_version: int  # optimizer steps attempted before the weights that sampled the reply
    env_seconds: float
    engine_seconds: float
    parsed_action: str | None = None  # the action that the reply names; None: the reply names no action
    thought_tokens: int = 0  # number of leading tokens that are the reply's thought; the other tokens name the action
    metrics: Mapping[str, float] = field(default_factory=dict)  # values that the environment reports, by name
    env_errors: tuple[str, ...] = ()  # kinds of environment errors since the last turn that retries have fixed
    lost: tuple[str, ...] = ()  # kinds of faults that ended an episode, at this turn or since the last turn
    asked_again: bool = False  # the reply named no action, so nothing was executed and the reply is requested again
    invented: bool = False  # whether the reply names an action that does not exist
    branch_returns: tuple[float, ...] = ()  # discounted returns of branches from the state before this turn
    forked_turns: int = 0  # turns in branches from the state before this turn, and from the state after a cut
    image: bytes | None = None  # PNG of the observation, if the environment provides one
    seen: tuple[str, ...] = ()  # digests of the images in the observation
    # Digest of the whole conversation and "#occurrence", if the observation has only the conversation's new part.
    call: str = ""
    model: str = ""  # name of the model that the agent program requests
    bootstrap: tuple[Segment, ...] | None = None
    group: int | None = None  # label of the group of episodes with the same start state; None without groups

    def __post_init__(self) -> None:
        if self.terminated and self.bootstrap is not None:
            raise ValueError("a terminated turn has no next state to bootstrap from")

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def succeeded(self) -> bool:
        """Whether the episode that ends here succeeded: as the environment reports or, without a report, by its return.

        An episode that a fault of its environment ended has not succeeded.
        """
        if self.stop is StopReason.ENV_FAULT:
            return False
        return self.episode_return > CANCELLED if self.success is None else self.success

    @property
    def finite_metrics(self) -> dict[str, float]:
        """Metrics of the environment without NaN and infinities."""
        return {name: number for name, number in self.metrics.items() if math.isfinite(number)}

    @property
    def state(self) -> tuple[str, ...]:
        """Text and images of the observation; turns with equal values count as turns in the same state."""
        return (self.conversation or self.observation, *self.seen)

    @property
    def conversation(self) -> str:
        """Digest of the whole conversation, if the observation has only the new part; empty otherwise."""
        return self.call.partition("#")[0]


class PlacedTurn(NamedTuple):
    """A turn of a sample with its segments and their position."""

    turn: Turn
    read: tuple[Segment, ...]  # segments between the previous reply and this reply
    action: Segment  # the reply
    start: int  # index of the reply in the sample's ids
    columns: slice  # columns of the reply among the action tokens of the sample


@dataclass(frozen=True)
class Sample:
    """One training row: the segments that the model reads, and the turns whose replies are trained on.

    The k-th action segment is the reply of ``turns[k]``. With windowed memory a sample has one turn; with full memory
    it has all turns of an episode. All turns belong to one episode, so only the last turn can end the episode.
    """

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]

    def __post_init__(self) -> None:
        actions = self.actions
        if not self.turns or len(actions) != len(self.turns):
            raise ValueError(
                f"a sample needs one action segment per turn, got {len(actions)} for {len(self.turns)} turns"
            )
        if self.segments[-1] is not actions[-1]:
            raise ValueError("a sample must end with an action segment, since its last reward is for that action")
        if len(self.turns) > 1 and any(turn.done for turn in self.turns[:-1]):
            raise ValueError("only the last turn of a sample can end its episode")

    @cached_property
    def input(self) -> ModelInput:
        """All segments as one model input."""
        return input_of(self.segments)

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids, see :attr:`ModelInput.ids`."""
        return self.input.ids

    @cached_property
    def row(self) -> Row:
        """The input with logit positions before each sampled token."""
        positions: list[int] = []
        start = 0
        for segment in self.segments:
            stop = start + len(segment.input)
            if segment.kind is SegmentKind.ACTION:
                positions += range(start - 1, stop - 1)
            start = stop
        return Row(self.input, tuple(positions))

    @property
    def action_positions(self) -> tuple[int, ...]:
        """Positions of the sampled tokens in ``ids``."""
        return tuple([position + 1 for position in self.row.logit_positions])

    def placed_turns(self) -> Iterator[PlacedTurn]:
        """Yield the turns with their segments and positions."""
        turns, read, start, column = iter(self.turns), list[Segment](), 0, 0
        for segment in self.segments:
            if segment.is_action:
                yield PlacedTurn(next(turns), tuple(read), segment, start, slice(column, column + len(segment)))
                read, column = [], column + len(segment)
            else:
                read.append(segment)
            start += len(segment)

    @cached_property
    def actions(self) -> list[Segment]:
        """Action segments, one per turn."""
        return [segment for segment in self.segments if segment.kind is SegmentKind.ACTION]
