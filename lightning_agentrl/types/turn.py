"""Segments, turns and samples: what the policy was shown, what it replied, and what followed."""

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

    PROMPT = "prompt"  # everything before the first sampled token of a sample
    ACTION = "action"  # sampled by the policy
    OBSERVATION = "observation"  # from the environment, between two actions of one sample
    GLUE = "glue"  # template tokens that nobody sampled


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens of one kind.

    Args:
        kind: what produced the tokens.
        input: the tokens, at least one; those of actions are all text.
        logps: log-probabilities under which the engine sampled the tokens; one for each token of an action, empty
            otherwise.

    Raises:
        ValueError: there are no tokens, or an action has another number of log-probs.
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
        """The trainer's stream."""
        return self.input.ids

    @property
    def is_action(self) -> bool:
        return self.kind is SegmentKind.ACTION


def input_of(segments: Iterable[Segment]) -> ModelInput:
    """Return what a model reads of the segments, in order."""
    return ModelInput.join([segment.input for segment in segments])


@dataclass(frozen=True)
class ForkPlan:
    """Continuations of recorded episodes.

    Args:
        branches: continuations of each chosen state.
        every: the first turn of an episode in a rollout is chosen, and those whose number is a multiple of this.
        gamma: discount from turn to turn in what a continuation returns.
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


LATE = "late"  # among the errors of a turn: its environment was over its time, so the others went on without it


class StopReason(StrEnum):
    """Why an episode ended."""

    ENV_DONE = "env_done"  # the environment said terminated
    ENV_TRUNCATED = "env_truncated"  # the environment said truncated (its time limit)
    MAX_TURNS = "max_turns"  # our own limit of turns
    INVALID_ACTION = "invalid_action"  # truncated because the reply was invalid
    CONTEXT_LENGTH = "context_length"  # the context has no room left for the next prompt
    REPLY_BUDGET = "reply_budget"  # the replies of the episode have used up their tokens
    ENV_FAULT = "env_fault"  # the environment failed after this turn, beyond its retries


@dataclass(frozen=True, slots=True)
class Turn:
    """One observation shown to the policy and what its one reply led to.

    ``bootstrap`` holds the prompt of the state *after* this turn (nothing is sampled from it). It is set where the
    value recursion may be cut: at the last turn of a rollout, and at a truncated turn, where it shows the true final
    observation of the episode. It is never set on a terminated turn.
    """

    env: int  # index of the environment over all ranks
    episode: int  # number of the episode within the environment
    index: int  # number of the turn within the episode, from 0
    observation: str  # all of its text, also what later prompts do not show
    reply: str
    thought: str
    action: str  # the action that was executed
    valid: bool  # False: the reply named no action and the default action ran, or the environment refused the action
    env_reward: float
    reward: float  # environment reward with the penalty for an invalid reply, and with a judge's verdict
    episode_return: float  # sum of environment rewards of the episode up to and including this turn
    terminated: bool
    truncated: bool
    stop: StopReason | None  # None while the episode goes on
    success: bool | None  # as the environment reports it; None: it reports nothing
    hit_token_cap: bool  # the reply was cut by the per-turn token cap
    history_cuts: int  # turns of history left out because the prompt was over its limit
    policy_version: int  # optimizer steps behind the weights that sampled the reply
    env_seconds: float
    engine_seconds: float
    parsed_action: str | None = None  # the action that the reply names; None: none
    thought_tokens: int = 0  # leading tokens of the reply that are its thought; the others name the action
    metrics: Mapping[str, float] = field(default_factory=dict)  # what the environment reports, by name
    env_errors: tuple[str, ...] = ()  # kinds of environment errors that were recovered from on the way to this turn
    lost: tuple[str, ...] = ()  # kinds of faults that ended an episode: at this turn, or on the way to it
    asked_again: bool = False  # the reply could not be read, so nothing was executed, and it is asked for once more
    invented: bool = False  # the reply names an action that there is not
    branch_returns: tuple[float, ...] = ()  # of episodes played on from the state before this turn, discounted
    forked_turns: int = 0  # turns that were played for them, and from the state after it where the rollout ends
    image: bytes | None = None  # PNG of what was observed, if there is something to see
    seen: tuple[str, ...] = ()  # digests of the images that the observation showed
    call: str = ""  # digest of the whole conversation, if the observation is only what is new in it; # and occurrence
    model: str = ""  # name that the call asks for
    bootstrap: tuple[Segment, ...] | None = None
    group: int | None = None  # label of the episodes that began in the same state, where they are collected in groups

    def __post_init__(self) -> None:
        if self.terminated and self.bootstrap is not None:
            raise ValueError("a terminated turn has no next state to bootstrap from")

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated

    @property
    def succeeded(self) -> bool:
        """Whether the episode that ends here succeeded: as the environment reports, else by a positive return.

        An episode that is lost to a fault of its environment did not succeed.
        """
        if self.stop is StopReason.ENV_FAULT:
            return False
        return self.episode_return > CANCELLED if self.success is None else self.success

    @property
    def finite_metrics(self) -> dict[str, float]:
        """The metrics of the environment without NaN and infinities."""
        return {name: number for name, number in self.metrics.items() if math.isfinite(number)}

    @property
    def state(self) -> tuple[str, ...]:
        """Observed text and images. Turns in which they are equal count as turns in the same state."""
        return (self.conversation or self.observation, *self.seen)

    @property
    def conversation(self) -> str:
        """Digest of the whole conversation, if the observation is only what is new in it; else empty."""
        return self.call.partition("#")[0]


class PlacedTurn(NamedTuple):
    """A turn of a sample, with the text read before its reply and its position."""

    turn: Turn
    read: tuple[Segment, ...]  # since the reply before
    action: Segment  # the reply
    start: int  # of the reply, in the sample's ids
    columns: slice  # of the reply, among the action tokens of the sample


@dataclass(frozen=True)
class Sample:
    """One training row: the segments the model reads, and the turns whose replies are trained on.

    The k-th action segment is the reply of ``turns[k]``. Windowed memory gives one turn per sample; full memory gives
    one growing sample per episode. All turns are of one episode, so only the last one can end it.
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
            raise ValueError("a sample must end with an action segment, or its last reward would fall on no action")
        if len(self.turns) > 1 and any(turn.done for turn in self.turns[:-1]):
            raise ValueError("only the last turn of a sample can end its episode")

    @cached_property
    def input(self) -> ModelInput:
        """All segments, as the trainer's models read them."""
        return input_of(self.segments)

    @property
    def ids(self) -> tuple[int, ...]:
        """The trainer's stream."""
        return self.input.ids

    @cached_property
    def row(self) -> Row:
        """The input, read before each of the tokens that the policy sampled."""
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
        """Positions in ``ids`` of the tokens that the policy sampled."""
        return tuple([position + 1 for position in self.row.logit_positions])

    def placed_turns(self) -> Iterator[PlacedTurn]:
        """Yield the turns with their places."""
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
        """The action segments, one per turn."""
        return [segment for segment in self.segments if segment.kind is SegmentKind.ACTION]
