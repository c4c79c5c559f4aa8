"""A look at what a policy does, in numbers: validity, thoughts, ways to fail, lengths; for `agentrl inspect`."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lightning_agentrl.metrics.episodes import reported_numbers, succeeded, wilson_interval
from lightning_agentrl.metrics.invalid_replies import InvalidReplies, invalid_replies
from lightning_agentrl.metrics.thoughts import Thoughts, thoughts
from lightning_agentrl.types import StopReason, Turn
from lightning_agentrl.types.rounding import all_equal

LONGEST_CYCLE, TIMES = 4, 3  # an episode is stuck if its last turns are a cycle of so many, played so often


@dataclass(frozen=True)
class SeenTurn:
    """A turn with the texts around it.

    Args:
        turn: as it was played.
        prompt: everything that the model read before its reply.
        said: what the reply names as its action, without decoration.
        prompt_tokens: length of the prompt.
        reply_tokens: length of the reply.
    """

    turn: Turn
    prompt: str
    said: str
    prompt_tokens: int
    reply_tokens: int


@dataclass(frozen=True)
class SeenEpisode:
    """A whole episode, and the actions that could be named in it: those by their spellings, without decoration."""

    turns: tuple[SeenTurn, ...]
    actions: Mapping[str, str]
    lost: bool = False  # to a fault of the environment


class Failure(StrEnum):
    """How an episode failed."""

    FAULT = "the environment failed"
    STUCK = "the same action in the same place until the end"
    LOOP = "a loop of a few actions until the end"
    TIME_LIMIT = "the time limit"
    CONTEXT = "the prompt had no room left"
    BUDGET = "the tokens of its replies were used up"
    INVALID = "an invalid reply"
    DEATH = "ended by the environment without success (death, or a wrong answer)"


_BY_STOP = {
    StopReason.ENV_FAULT: Failure.FAULT,
    StopReason.CONTEXT_LENGTH: Failure.CONTEXT,
    StopReason.REPLY_BUDGET: Failure.BUDGET,
    StopReason.INVALID_ACTION: Failure.INVALID,
    StopReason.ENV_DONE: Failure.DEATH,
}


@dataclass(frozen=True)
class Spread:
    """Some numbers: their ends, their middle, and the one that 5 % of them exceed."""

    least: float
    median: float
    most_of_them: float
    largest: float

    @staticmethod
    def of(numbers: Sequence[float]) -> Spread | None:
        """Return None if there are none."""
        if not numbers:
            return None
        ordered = sorted(numbers)
        at = min(math.ceil(0.95 * len(ordered)), len(ordered)) - 1
        return Spread(ordered[0], statistics.median(ordered), ordered[at], ordered[-1])


@dataclass(frozen=True)
class Average:
    """A mean and its standard error; the error is not a number for fewer than two, or where one is infinite."""

    mean: float
    error: float

    @staticmethod
    def of(numbers: Sequence[float]) -> Average | None:
        """Return None if there are none."""
        if not numbers:
            return None
        if not all(map(math.isfinite, numbers)):  # an environment may report such, of which statistics makes an error
            return Average(sum(numbers) / len(numbers), math.nan)
        if len(numbers) < 2:
            return Average(numbers[0], math.nan)
        spread = 0.0 if all_equal(numbers) else statistics.stdev(numbers)  # sums of rewards may differ by rounding
        return Average(statistics.fmean(numbers), spread / math.sqrt(len(numbers)))


@dataclass(frozen=True)
class Look:
    """What was seen in some episodes of one source."""

    episodes: int
    turns: int
    successes: int
    interval: tuple[float, float]  # of the share of successes, 95 %
    returns: Average | None
    lengths: Spread | None  # turns of an episode
    reported: Mapping[str, Average]  # numbers that the environment gives, at the last turn
    valid: int  # turns
    invalid: InvalidReplies
    actions: Mapping[str, int]  # executed, commonest first
    no_ops: Mapping[str, int]  # those after which the observation was the same, commonest first
    followed: int  # turns that another observation of their episode follows
    failures: Mapping[Failure, int]  # commonest first
    thoughts: Thoughts | None  # None: no reply has one
    thought_tokens: Spread | None
    reply_tokens: Spread | None
    capped: int  # replies cut by their cap
    prompt_tokens: Spread | None
    cut: int  # turns with history left out

    @property
    def valid_ratio(self) -> float:
        """The share of turns with a valid action; not a number without turns."""
        return self.valid / self.turns if self.turns else math.nan


def look_at(episodes: Sequence[SeenEpisode]) -> Look:
    """Return what there is to see in whole episodes."""
    seen = [turn for episode in episodes for turn in episode.turns]
    turns = [one.turn for one in seen]
    played = [tuple(one.turn for one in episode.turns) for episode in episodes]
    lasts = [each[-1] for each in played if each]
    failures = Counter(how for one, each in zip(episodes, played, strict=True) if (how := failure(each, one.lost)))
    successes = len(episodes) - failures.total()
    followed = [pair for each in played for pair in pairwise(each) if not pair[0].asked_again]
    all_numbers = [reported_numbers(last) for last in lasts]
    names = sorted({name for numbers in all_numbers for name in numbers})
    reported = {name: Average.of([numbers[name] for numbers in all_numbers if name in numbers]) for name in names}
    return Look(
        episodes=len(episodes),
        turns=len(turns),
        successes=successes,
        interval=wilson_interval(successes, len(episodes)),
        returns=Average.of([last.episode_return for last in lasts]),
        lengths=Spread.of([len(each) for each in played if each]),
        reported={name: average for name, average in reported.items() if average},
        valid=sum(turn.valid for turn in turns),
        invalid=invalid_replies(
            [
                (one.said, one.turn.parsed_action is not None, one.turn.hit_token_cap, episode.actions)
                for episode in episodes
                for one in episode.turns
                if not one.turn.valid
            ]
        ),
        actions=dict(Counter(turn.action for turn in turns if not turn.asked_again).most_common()),
        no_ops=dict(Counter(now.action for now, then in followed if now.state == then.state).most_common()),
        followed=len(followed),
        failures=dict(failures.most_common()),
        thoughts=thoughts([[(one.turn.thought, one.prompt) for one in episode.turns] for episode in episodes]),
        thought_tokens=Spread.of([turn.thought_tokens for turn in turns if turn.thought]),
        reply_tokens=Spread.of([one.reply_tokens for one in seen]),
        capped=sum(turn.hit_token_cap for turn in turns),
        prompt_tokens=Spread.of([one.prompt_tokens for one in seen]),
        cut=sum(turn.history_cuts > 0 for turn in turns),
    )


def failure(turns: Sequence[Turn], lost: bool) -> Failure | None:
    """Return how an episode failed; None if it succeeded."""
    if lost or not turns:
        return Failure.FAULT
    last = turns[-1]
    if succeeded(last):
        return None
    if last.stop in _BY_STOP:
        return _BY_STOP[last.stop]
    period = cycle([(turn.state, turn.action) for turn in turns if not turn.asked_again])
    return {0: Failure.TIME_LIMIT, 1: Failure.STUCK}.get(period, Failure.LOOP)


def cycle(steps: Sequence[object]) -> int:
    """Return the length of the shortest cycle that the last steps go through often enough; 0 if there is none."""
    for period in range(1, LONGEST_CYCLE + 1):
        tail = steps[-period * TIMES :]
        if len(tail) == period * TIMES and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return period
    return 0
