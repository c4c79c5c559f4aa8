"""Statistics of a policy's behavior for `agentrl inspect`: validity, thoughts, kinds of failure, lengths."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, pairwise
from statistics import fmean

from lightning_agentrl.metrics.episodes import wilson_interval
from lightning_agentrl.metrics.invalid_replies import InvalidReplies, invalid_replies
from lightning_agentrl.metrics.rollout import words
from lightning_agentrl.tools.view import Entry, Report, Table
from lightning_agentrl.types import StopReason, Turn
from lightning_agentrl.types.rounding import all_equal

LONGEST_CYCLE, TIMES = 4, 3  # an episode loops if it ends with 3 repetitions of a cycle of at most 4 turns


@dataclass(frozen=True)
class SeenTurn:
    """A turn with its prompt and lengths.

    Args:
        turn: played turn.
        prompt: text of the whole prompt.
        said: normalized text that the reply names as its action.
        prompt_tokens: number of tokens of the prompt.
        reply_tokens: number of tokens of the reply.
    """

    turn: Turn
    prompt: str
    said: str
    prompt_tokens: int
    reply_tokens: int


@dataclass(frozen=True)
class SeenEpisode:
    """A whole episode, and its possible actions by their normalized names and aliases."""

    turns: tuple[SeenTurn, ...]
    actions: Mapping[str, str]
    lost: bool = False  # whether the episode was lost to a fault of the environment


class Failure(StrEnum):
    """Kind of failure of an episode."""

    FAULT = "the environment failed"
    STUCK = "the same action in the same place until the end"
    LOOP = "a loop of a few actions until the end"
    TIME_LIMIT = "the time limit"
    CONTEXT = "the prompt limit"
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
    """Minimum, median, 95 % quantile and maximum of some numbers."""

    least: float
    median: float
    most_of_them: float
    largest: float

    @staticmethod
    def of(numbers: Sequence[float]) -> Spread | None:
        """Return the spread of the numbers, or None without numbers."""
        if not numbers:
            return None
        ordered = sorted(numbers)
        at = min(math.ceil(0.95 * len(ordered)), len(ordered)) - 1
        return Spread(ordered[0], statistics.median(ordered), ordered[at], ordered[-1])


@dataclass(frozen=True)
class Average:
    """A mean and its standard error, which is NaN for fewer than two numbers or if a number is not finite."""

    mean: float
    error: float

    @staticmethod
    def of(numbers: Sequence[float]) -> Average | None:
        """Return the average of the numbers, or None without numbers."""
        if not numbers:
            return None
        # Environments may report non-finite numbers, for which `statistics` raises.
        if not all(map(math.isfinite, numbers)):
            return Average(sum(numbers) / len(numbers), math.nan)
        if len(numbers) < 2:
            return Average(numbers[0], math.nan)
        spread = 0.0 if all_equal(numbers) else statistics.stdev(numbers)  # `all_equal` ignores rounding
        return Average(statistics.fmean(numbers), spread / math.sqrt(len(numbers)))


@dataclass(frozen=True)
class Look:
    """Statistics of episodes of one source."""

    episodes: int
    turns: int
    successes: int
    interval: tuple[float, float]  # 95 % interval of the share of successes
    returns: Average | None
    lengths: Spread | None  # number of turns of an episode
    reported: Mapping[str, Average]  # metrics of the environment at the last turn
    valid: int  # number of valid turns
    invalid: InvalidReplies
    actions: Mapping[str, int]  # counts of executed actions, most frequent first
    no_ops: Mapping[str, int]  # counts of actions that did not change the observation, most frequent first
    followed: int  # number of turns that are followed by another turn
    failures: Mapping[Failure, int]  # counts of failures, most frequent first
    thoughts: Thoughts | None  # None if no reply has a thought
    thought_tokens: Spread | None
    reply_tokens: Spread | None
    capped: int  # number of replies cut by their token limit
    prompt_tokens: Spread | None
    cut: int  # number of turns whose prompt lacks part of the history

    @property
    def valid_ratio(self) -> float:
        """The share of turns with a valid action; NaN without turns."""
        return self.valid / self.turns if self.turns else math.nan


def look_at(episodes: Sequence[SeenEpisode]) -> Look:
    """Compute the statistics of whole episodes."""
    seen = [turn for episode in episodes for turn in episode.turns]
    turns = [one.turn for one in seen]
    played = [tuple(one.turn for one in episode.turns) for episode in episodes]
    lasts = [each[-1] for each in played if each]
    failures = Counter(how for one, each in zip(episodes, played, strict=True) if (how := failure(each, one.lost)))
    successes = len(episodes) - failures.total()
    followed = [pair for each in played for pair in pairwise(each) if not pair[0].asked_again]
    all_numbers = [last.finite_metrics for last in lasts]
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
    """Return the kind of failure of an episode, or None if it succeeded."""
    if lost or not turns:
        return Failure.FAULT
    last = turns[-1]
    if last.succeeded:
        return None
    if last.stop in _BY_STOP:
        return _BY_STOP[last.stop]
    period = cycle([(turn.state, turn.action) for turn in turns if not turn.asked_again])
    return {0: Failure.TIME_LIMIT, 1: Failure.STUCK}.get(period, Failure.LOOP)


def cycle(steps: Sequence[object]) -> int:
    """Return the length of the shortest cycle that the last steps repeat ``TIMES`` times; 0 without such a cycle."""
    for period in range(1, LONGEST_CYCLE + 1):
        tail = steps[-period * TIMES :]
        if len(tail) == period * TIMES and all(tail[i] == tail[i - period] for i in range(period, len(tail))):
            return period
    return 0


LEAST_VALID = 0.95  # smallest share of valid turns that needs no better prompt or aliases
SHOWN = 12  # number of the most frequent items to show
# Thresholds of warnings. A warning shows where to look, and need not be a fault.
MOST_CAPPED, MOST_NO_OPS, MOST_COPIED, MOST_SIMILAR, MOST_ONE_ACTION, MOST_CUT = 0.05, 0.5, 0.5, 0.8, 0.9, 0.1


def make_report(title: str, look: Look, key: str, max_prompt_tokens: int, max_reply_tokens: int) -> Report:
    """Return statistics of episodes as a report with warnings.

    Args:
        title: title of the report.
        look: statistics of the episodes.
        key: config key of the episodes' source.
        max_prompt_tokens: limit of tokens of a prompt.
        max_reply_tokens: limit of tokens of a reply.
    """
    tables = [
        _outcome(look),
        _validity(look),
        *([_invalid(look, key)] if look.invalid.kinds else []),
        *([_table("Actions that do not exist", look.invalid.invented, look.turns)] if look.invalid.invented else []),
        _failures(look),
        _actions(look),
        _thoughts(look.thoughts),
        _lengths(look, max_prompt_tokens, max_reply_tokens),
    ]
    return Report(title, tables)


def _outcome(look: Look) -> Table:
    low, high = look.interval
    share = look.successes / look.episodes if look.episodes else math.nan
    value = f"{_percent(share)} ({_percent(low)} to {_percent(high)}), {look.successes} of {look.episodes}"
    warning = ""
    if look.episodes and not look.successes and look.returns and look.returns.error == 0:
        warning = (
            "no episode succeeded and all have the same return, so there is no learning signal; begin with an easier "
            "level, or reward progress"
        )
    elif look.episodes and look.successes == look.episodes:
        warning = "every episode succeeded, so there is little left to learn; choose a harder level"
    rows = [Entry("success", value, share, warning, brief=True)]
    if look.returns:
        rows.append(Entry("return", _average(look.returns)))
    rows += [Entry(name, _average(average)) for name, average in look.reported.items()]
    if look.lengths:
        rows.append(Entry("turns of an episode", _spread(look.lengths), brief=True))
    return Table("Outcome", rows, "success with its 95 % interval; means with their standard error")


def _validity(look: Look) -> Table:
    ratio = look.valid_ratio
    warning = ""
    if look.turns and ratio < LEAST_VALID:
        mend = "add the suggested aliases, or " if look.invalid.aliases else ""
        warning = (
            f"below {_percent(LEAST_VALID)}, so much of the training would go into the format: {mend}describe the "
            "format of a reply more clearly in the prompt"
        )
    rows = [Entry("valid actions", f"{_percent(ratio)} of {look.turns} turns", ratio, warning, brief=True)]
    rows += [Entry(kind.value, _count(n, look.turns), n / look.turns) for kind, n in look.invalid.kinds.items()]
    return Table("Valid actions", rows, "and kinds of the other replies")


def _invalid(look: Look, key: str) -> Table:
    texts = dict(islice(look.invalid.texts.items(), SHOWN))
    rows = [Entry(_quoted(text), _count(n, look.turns), n / look.turns) for text, n in texts.items()]
    aliases = {said: action for said, (action, _) in look.invalid.aliases.items()}
    if not aliases:
        return Table("Most frequent invalid replies", rows)
    lines = [f"    {_yaml(said)}: {_yaml(action)}" for said, action in islice(aliases.items(), SHOWN)]
    about = f"aliases that would make some of them valid, for {key}:"
    return Table("Most frequent invalid replies", rows, about, "\n".join(["wording:", "  aliases:", *lines]))


def _failures(look: Look) -> Table:
    failed = sum(look.failures.values())
    most = max(failed, 1)
    rows = [Entry(how.value, _count(n, failed), n / most, brief=True) for how, n in look.failures.items()]
    looped = look.failures.get(Failure.LOOP, 0) + look.failures.get(Failure.STUCK, 0)
    if rows and looped > failed / 2:
        rows.append(
            Entry("stuck or in a loop", _count(looped, failed), looped / most, "a memory of more turns may help")
        )
    idle = sum(look.no_ops.values())
    if look.followed:
        share = idle / look.followed
        warning = (
            f"more than {_percent(MOST_NO_OPS)} of the actions did not change the observation; does it describe the "
            "effect of an action?"
            if share > MOST_NO_OPS
            else ""
        )
        rows.append(Entry("actions that changed nothing", _count(idle, look.followed), share, warning, brief=True))
        rows += [Entry(f"of these {_quoted(name)}", _count(n, idle)) for name, n in islice(look.no_ops.items(), 3)]
    return Table("How episodes failed", rows, "nothing changed: the next observation was the same")


def _actions(look: Look) -> Table:
    table = _table("Actions taken", look.actions, sum(look.actions.values()))
    rows = list(table.rows)
    if len(look.actions) > 1 and rows and (rows[0].share or 0.0) > MOST_ONE_ACTION:
        rows[0] = Entry(rows[0].name, rows[0].value, rows[0].share, "nearly every turn takes this action")
    return Table(table.title, rows, "including default actions")


def _thoughts(found: Thoughts | None) -> Table:
    if found is None:
        return Table("Thoughts", [Entry("thoughts", "none: replies are only actions", brief=True)])
    rows = [Entry("replies with a thought", _count(found.count, found.count + found.missing), brief=True)]
    rows += [Entry(f"distinct runs of {n} words", _percent(share), share) for n, share in found.distinct.items()]
    remarks = {
        "similar to the previous thought": (found.similarity, MOST_SIMILAR, "thoughts hardly change from turn to turn"),
        "equal to the previous thought": (found.equal, MOST_SIMILAR, "thoughts are repeated word for word"),
        "copied from the prompt": (found.copied, MOST_COPIED, "thoughts mostly repeat the prompt"),
    }
    if found.within is not None:
        rows.append(Entry("distinct word pairs within a thought", _percent(found.within), found.within))
    for name, (share, most, remark) in remarks.items():
        if share is not None:
            warning = remark if share > most else ""
            rows.append(Entry(name, _percent(share), share, warning, brief=name.startswith("copied")))
    return Table(
        "Diversity of thoughts",
        rows,
        f"similar: shared word pairs; copied: runs of {COPIED} words that are in the prompt. The share of distinct "
        "runs over all thoughts falls with their number",
    )


def _lengths(look: Look, max_prompt_tokens: int, max_reply_tokens: int) -> Table:
    rows = []
    if look.prompt_tokens:
        rows.append(Entry("prompt", f"{_spread(look.prompt_tokens)} of {max_prompt_tokens}", brief=True))
        share = look.cut / look.turns
        warning = "raise prompt.max_prompt_tokens, or shorten the memory" if share > MOST_CUT else ""
        rows.append(Entry("prompts with history cut", _count(look.cut, look.turns), share, warning))
    if look.reply_tokens:
        rows.append(Entry("reply", f"{_spread(look.reply_tokens)} of {max_reply_tokens}", brief=True))
    if look.thought_tokens:
        rows.append(Entry("thought", _spread(look.thought_tokens)))
    share = look.capped / look.turns if look.turns else 0.0
    shorter = "thoughts" if look.thought_tokens else "replies"
    warning = f"raise max_reply_tokens, or ask for shorter {shorter}" if share > MOST_CAPPED else ""
    rows.append(Entry("replies cut by the limit", _count(look.capped, look.turns), share, warning))
    return Table("Lengths in tokens", rows, "minimum, median, 95 %, maximum")


def _table(title: str, counts: Mapping[str, int], whole: int) -> Table:
    first = islice(counts.items(), SHOWN)
    return Table(title, [Entry(_quoted(name), _count(n, whole), n / whole) for name, n in first])


def _percent(share: float) -> str:
    return "none" if math.isnan(share) else f"{100 * share:.1f} %"


def _count(count: int, whole: int) -> str:
    return f"{count} ({_percent(count / whole)})" if whole else str(count)


def _average(average: Average) -> str:
    return f"{average.mean:.3g}" + ("" if math.isnan(average.error) else f" ± {average.error:.2g}")


def _spread(spread: Spread) -> str:
    return ", ".join(f"{x:g}" for x in (spread.least, spread.median, spread.most_of_them, spread.largest))


def _quoted(text: str) -> str:
    return f"“{text if len(text) <= 100 else text[:97] + '...'}”" if text else "nothing"


def _yaml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


SIZES = (1, 2, 3)  # lengths of the n-grams that are counted
COPIED = 4  # number of consecutive words that count as copied if found in the prompt


@dataclass(frozen=True)
class Thoughts:
    """Statistics of the thoughts of episodes; a field is None if it has no data.

    Args:
        count: number of replies with a thought.
        missing: number of replies without a thought.
        distinct: by n, share of distinct n-grams among all n-grams of all thoughts; more thoughts lower the share.
        within: mean share of distinct word pairs within a thought; low if thoughts repeat themselves.
        similarity: mean Jaccard similarity of the word pairs of consecutive thoughts.
        equal: share of thoughts that equal the thought of the previous turn.
        copied: share of runs of four words that the prompt contains.
    """

    count: int
    missing: int
    distinct: dict[int, float]
    within: float | None
    similarity: float | None
    equal: float | None
    copied: float | None


def thoughts(episodes: Sequence[Sequence[tuple[str, str]]]) -> Thoughts | None:
    """Compute statistics of thoughts.

    Args:
        episodes: for each turn of each episode, its thought, which may be empty, and its prompt.

    Returns:
        The statistics; None without thoughts.
    """
    pairs = [pair for episode in episodes for pair in episode]
    said = [words(thought) for thought, _ in pairs if thought]
    if not said:
        return None
    in_a_row = [
        (words(before), words(now)) for episode in episodes for (before, _), (now, _) in pairwise(episode) if now
    ]
    in_a_row = [(before, now) for before, now in in_a_row if before]
    similar = [
        len(a & b) / len(a | b) for a, b in ((set(ngrams(x, 2)), set(ngrams(y, 2))) for x, y in in_a_row) if a | b
    ]
    copied = [gram in read for thought, prompt in pairs for gram, read in _runs(words(thought), prompt)]
    inside = [len(set(grams)) / len(grams) for one in said if (grams := ngrams(one, 2))]
    return Thoughts(
        count=len(said),
        missing=len(pairs) - len(said),
        distinct={size: share for size in SIZES if (share := _distinct(said, size)) is not None},
        within=_mean(inside),
        similarity=_mean(similar),
        equal=_mean([before == now for before, now in in_a_row]),
        copied=_mean(copied),
    )


def ngrams(said: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """Return all n-grams of ``size`` words."""
    return [tuple(said[i : i + size]) for i in range(len(said) - size + 1)]


def _distinct(said: Sequence[Sequence[str]], size: int) -> float | None:
    grams = [gram for one in said for gram in ngrams(one, size)]
    return len(set(grams)) / len(grams) if grams else None


def _runs(said: Sequence[str], prompt: str) -> list[tuple[tuple[str, ...], set[tuple[str, ...]]]]:
    grams = ngrams(said, COPIED)
    read = set(ngrams(words(prompt), COPIED)) if grams else set()
    return [(gram, read) for gram in grams]


def _mean(numbers: Sequence[float]) -> float | None:
    return fmean(numbers) if numbers else None
