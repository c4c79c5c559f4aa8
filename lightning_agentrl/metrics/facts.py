"""What some episodes say of a task and a policy: lengths, states that recur, returns, rewards, chance."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TypeVar

import numpy as np

from lightning_agentrl.metrics.episodes import wilson_interval
from lightning_agentrl.types import StopReason, Turn
from lightning_agentrl.types.rounding import all_equal

DRAWS = 1000  # of a bootstrap
LEAST_STARTS = 4  # below which a bootstrap says nothing
V = TypeVar("V")


@dataclass(frozen=True)
class MeasuredEpisode:
    """An episode and where it began.

    Args:
        start: equal for episodes of one environment, task and seed.
        turns: at least one.
        reply_tokens: of each turn.
    """

    start: Hashable
    turns: tuple[Turn, ...]
    reply_tokens: tuple[int, ...]

    @property
    def rewards(self) -> list[float]:
        """What the environment and its judge gave at each turn, without penalties for replies."""
        return [turn.env_reward + turn.metrics.get("judge", 0.0) for turn in self.turns]

    def returns_to_go(self, discount: float) -> list[float]:
        """Return the discounted rewards from each turn on."""
        found, total = [], 0.0
        for reward in reversed(self.rewards):
            total = reward + discount * total
            found.append(total)
        return found[::-1]


@dataclass(frozen=True)
class Measured:
    """A number with its 95 % interval; not a number where nothing tells it."""

    value: float
    low: float = math.nan
    high: float = math.nan


UNKNOWN = Measured(math.nan)


@dataclass(frozen=True)
class Facts:
    """What was measured. Shares are of 1; intervals of shares of turns come from a bootstrap over starts.

    Args:
        episodes: with at least one turn.
        starts: that they began in.
        shared_starts: with several episodes.
        turns: of all episodes.
        lost: episodes that ended in a fault of the environment.
        unended: episodes that were stopped since they took too many turns.
        reply_tokens: median and 90 % of the tokens of a reply.
        horizon: median and 90 % of the turns of an episode.
        cut: episodes that a limit ended, of turns, tokens or context.
        begin_alike: starts, of those with several episodes, whose episodes began with the same observation.
        met_in_others: turns, of those after the first, whose state occurs in another episode of the start.
        met_again: turns, of those after the first, whose state occurred earlier in the episode.
        mean_return: of an episode, undiscounted.
        above_least: episodes with a return above the least one.
        between: variance of the returns from start to start.
        within: variance of the returns of one start's episodes.
        mixed: starts, of those with several episodes, whose episodes do not all return the same.
        rewarded: turns with a reward other than 0.
        told_apart: turns with a reward other than the commonest one.
        on_the_way: of these turns, those before the last one of their episode.
        repeats: episodes that came out the same when their seed and actions were played again.
        uncertain: states and actions met several times in a start, whose outcome was not always the same.
        explained: variance of discounted returns that a quick critic explains in starts that it has not seen.
        first_values: largest absolute value of the untrained critic; 0 without one.
        mean_turns: of an episode.
        iteration_turns: of the config.
        whole_games: the interaction of the config plays whole games only, as groups are.
    """

    episodes: int
    starts: int
    shared_starts: int
    turns: int
    lost: int
    unended: int
    reply_tokens: tuple[float, float]
    horizon: tuple[float, float]
    cut: Measured
    begin_alike: Measured
    met_in_others: Measured
    met_again: Measured
    mean_return: float
    above_least: Measured
    between: float
    within: float
    mixed: Measured
    rewarded: Measured
    told_apart: Measured
    on_the_way: Measured
    repeats: Measured
    uncertain: Measured
    explained: Measured
    first_values: float
    mean_turns: float
    iteration_turns: int
    whole_games: bool = False


def measure(
    episodes: Sequence[MeasuredEpisode],
    *,
    iteration_turns: int,
    lost: int = 0,
    repeats: Sequence[bool] = (),
    explained: Measured = UNKNOWN,
    first_values: float = 0.0,
    whole_games: bool = False,
) -> Facts:
    """Return what episodes say.

    Args:
        episodes: at least one; those that were lost with the turns before the fault are left out.
        iteration_turns: of the config.
        lost: episodes that ended in a fault.
        repeats: whether each replayed episode came out the same.
        explained: by a quick critic.
        first_values: largest absolute value of the untrained critic.
        whole_games: see :class:`Facts`.

    Raises:
        ValueError: there are no episodes.
    """
    if not episodes:
        raise ValueError("nothing can be measured without an episode")
    starts = _by(episodes, lambda one: one.start)
    shared = [several for several in starts.values() if len(several) > 1]
    returns = [sum(one.rewards) for one in episodes]
    lengths = [len(one.turns) for one in episodes]
    replies = [tokens for one in episodes for tokens in one.reply_tokens]
    between, within = variances([[sum(one.rewards) for one in several] for several in starts.values()])
    commonest = Counter(reward for one in episodes for reward in one.rewards).most_common(1)[0][0]
    above = sum(not all_equal((each, min(returns))) for each in returns)
    lasts = [one.turns[-1] for one in episodes]
    return Facts(
        episodes=len(episodes),
        starts=len(starts),
        shared_starts=len(shared),
        turns=sum(lengths),
        lost=lost,
        unended=sum(not last.done for last in lasts),
        reply_tokens=middle_and_most(replies),
        horizon=middle_and_most(lengths),
        cut=share(sum(last.truncated and last.stop is not StopReason.INVALID_ACTION for last in lasts), len(lasts)),
        begin_alike=share(sum(len({one.turns[0].state for one in several}) == 1 for several in shared), len(shared)),
        met_in_others=share_of_turns([met_in_others([_states(one) for one in several]) for several in starts.values()]),
        met_again=share_of_turns([met_again([_states(one) for one in several]) for several in starts.values()]),
        mean_return=statistics.fmean(returns),
        above_least=share(above, len(returns)),
        between=between,
        within=within,
        mixed=share(sum(not all_equal([sum(one.rewards) for one in several]) for several in shared), len(shared)),
        rewarded=share_of_turns(_counted(starts, lambda one: (sum(r != 0 for r in one.rewards), len(one.turns)))),
        told_apart=share_of_turns(
            _counted(starts, lambda one: (sum(r != commonest for r in one.rewards), len(one.turns)))
        ),
        on_the_way=share_of_turns(
            _counted(
                starts,
                lambda one: (sum(r != commonest for r in one.rewards[:-1]), sum(r != commonest for r in one.rewards)),
            )
        ),
        repeats=share(sum(repeats), len(repeats)),
        uncertain=share(*_summed(uncertain([one.turns for one in several]) for several in starts.values())),
        explained=explained,
        first_values=first_values,
        mean_turns=statistics.fmean(lengths),
        iteration_turns=iteration_turns,
        whole_games=whole_games,
    )


def middle_and_most(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the number that 10 % of them exceed."""
    ordered = sorted(numbers)
    return float(statistics.median(ordered)), float(ordered[math.ceil(0.9 * len(ordered)) - 1])


def share(part: int, whole: int) -> Measured:
    """Return a share with Wilson's interval."""
    return Measured(part / whole, *wilson_interval(part, whole)) if whole else UNKNOWN


def share_of_turns(parts: Sequence[tuple[float, float]]) -> Measured:
    """Return :func:`ratio` of numbers of turns, of which the first are among the second.

    Where all starts agree that none or all of them are, a bootstrap would be certain of that. The interval is then
    Wilson's, in which a start counts once, as if its turns said no more than one of them.
    """
    found, starts = ratio(parts), sum(whole > 0 for _, whole in parts)
    agree = found.value in (0, 1) and not math.isnan(found.low)
    return share(round(found.value * starts), starts) if agree else found


def ratio(parts: Sequence[tuple[float, float]]) -> Measured:
    """Return the ratio of two sums over starts, with an interval from a bootstrap over those that have a part in it.

    The percentiles are widened as for Student's t, since a bootstrap of so few is too narrow (Hesterberg 2015). Very
    few starts give no interval.
    """
    pairs_S2 = np.array(parts, dtype=np.float64).reshape(-1, 2)
    pairs_S2 = pairs_S2[pairs_S2[:, 1] > 0]  # drawn too, others would only make those that tell something seem many
    part, whole = pairs_S2.sum(0)
    if not len(pairs_S2):
        return UNKNOWN
    if len(pairs_S2) < LEAST_STARTS:
        return Measured(float(part / whole))
    drawn = np.random.default_rng(0).integers(len(pairs_S2), size=(DRAWS, len(pairs_S2)))
    sums_D2 = pairs_S2[drawn].sum(1)
    ratios = sums_D2[:, 0] / sums_D2[:, 1]
    tail = NormalDist().cdf(-student_quantile(len(pairs_S2) - 1) * math.sqrt(len(pairs_S2) / (len(pairs_S2) - 1)))
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Measured(float(part / whole), float(low), float(high))


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by its expansion in 1 / ``freedom``; 1 % too low for 3, then nearer.

    Abramowitz and Stegun 26.7.5.
    """
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / 4 / freedom
        + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / freedom**2
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / freedom**3
    )


def variances(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the variance between groups and that within them, as an analysis of variance estimates them.

    Each is not a number where nothing tells it.
    """
    several = [group for group in groups if len(group) > 1]
    spare = sum(len(group) - 1 for group in several)
    if not spare:
        return math.nan, math.nan
    within = sum(statistics.variance(group) * (len(group) - 1) for group in several) / spare
    if len(several) < 2:
        return math.nan, within
    means = [statistics.fmean(group) for group in several]
    noise = statistics.fmean(within / len(group) for group in several)
    return max(statistics.variance(means) - noise, 0.0), within


def met_in_others(episodes: Sequence[Sequence[Hashable]]) -> tuple[int, int]:
    """Count turns whose state occurs in another episode, and all of them; first turns do not count.

    Episodes without another one from their start do not count either.
    """
    if len(episodes) < 2:
        return 0, 0
    owners = Counter(state for states in episodes for state in set(states))
    later = [state for states in episodes for state in states[1:]]
    return sum(owners[state] > 1 for state in later), len(later)


def met_again(episodes: Sequence[Sequence[Hashable]]) -> tuple[int, int]:
    """Count turns whose state occurred earlier in their episode, and all of them; first turns do not count."""
    again = sum(state in states[:place] for states in episodes for place, state in enumerate(states) if place)
    return again, sum(max(len(states) - 1, 0) for states in episodes)  # without any where all was asked for again


def uncertain(episodes: Sequence[Sequence[Turn]]) -> tuple[int, int]:
    """Count pairs of state and action with different outcomes, and all that were met several times.

    An outcome is the reward and the next state, or the end. What follows a limit is not known.
    """
    outcomes: dict[Hashable, list[Hashable]] = defaultdict(list)
    for turns in episodes:
        for turn, after in pairwise((*turns, None)):
            if turn is None or turn.asked_again or (after is None and not turn.terminated):
                continue
            outcomes[turn.state, turn.action].append((turn.env_reward, None if after is None else after.state))
    several = [found for found in outcomes.values() if len(found) > 1]
    return sum(len(set(found)) > 1 for found in several), len(several)


def _states(episode: MeasuredEpisode) -> list[Hashable]:
    """Return the states in which something was done; a reply that is asked for again leaves a state as it was."""
    return [turn.state for turn in episode.turns if not turn.asked_again]


def _by(items: Sequence[V], key: Callable[[V], Hashable]) -> dict[Hashable, list[V]]:
    found: dict[Hashable, list[V]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _counted(
    starts: Mapping[Hashable, Sequence[MeasuredEpisode]], count: Callable[[MeasuredEpisode], tuple[int, int]]
) -> list[tuple[float, float]]:
    """Return part and whole of each start."""
    return [_summed(count(one) for one in several) for several in starts.values()]


def _summed(pairs: Iterator[tuple[int, int]]) -> tuple[int, int]:
    parts, wholes = 0, 0
    for part, whole in pairs:
        parts, wholes = parts + part, wholes + whole
    return parts, wholes
