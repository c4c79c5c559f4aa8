"""From what was measured of a task to one of six settings, with reasons: a pure function, and the evidence it cites."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from lightning_agentrl.metrics.facts import Facts, Measured

PLAYED, GROUP, SHORT_CUT, LONG_CUT, WARMUP_ROUNDS = 4, 8, 8, 64, 10
LEAST_EPISODES, LEAST_STARTS = 24, 8  # below which nothing is more than a guess
LEAST_ENDED = 0.9  # of the episodes, for groups, which are whole ones
LEAST_MIXED = 0.25  # of the starts, for groups to have anything to compare
LEAST_WITHIN = 0.5  # of the variance of returns lies within starts; below it, the start decides
LEAST_MET = 0.3  # of the turns after the first, for a comparison by state
LEAST_DENSE = 0.2  # of the turns have a reward of their own
LEAST_EXPLAINED = 0.2  # by the quick critic, of returns in new starts
VERY_SHORT = 4  # turns of a median episode, of which a short cut holds two
LONG_REPLY = 8  # tokens
NEAR = 36  # turns of a median episode: nearer to the 24 of the trials at horizon 12 than to the 48 of those at 24
LONG_EPISODE = 48  # turns: beyond what groups were tried at


class Setting(StrEnum):
    """The six settings of the recipe among which is chosen."""

    SHORT_CUTS = "short_cuts"
    LONG_CUTS = "long_cuts"
    ONE_PAIR = "one_pair"
    GROUPS = "groups"
    GROUPS_BY_STATE = "groups_by_state"
    WARM_UP = "warm_up"


class Sure(StrEnum):
    """How sure an advice is."""

    STRONG = "strong"  # a cell of the laboratory says so, with an interval
    WEAK = "weak"  # a trial of few seeds says so, or a cell about another task than this one
    GUESS = "a guess"  # nothing was measured


@dataclass(frozen=True)
class Cited:
    """Where evidence is written.

    Args:
        page: under docs.
        section: its heading there.
        figure: what it says.
    """

    page: str
    section: str
    figure: str

    def __str__(self) -> str:
        return f"docs/{self.page}, {self.section}: {self.figure}"


@dataclass(frozen=True)
class Choice:
    """A part of a setting.

    Args:
        part: of the recipe.
        value: what is chosen.
        why: in a sentence, from what was measured.
        sure: how sure that is.
        source: what says so; None: nothing does.
        decides: whether the setting would be another one without it.
    """

    part: str
    value: str
    why: str
    sure: Sure
    source: Cited | None = None
    decides: bool = False


@dataclass(frozen=True)
class Advice:
    """One setting.

    Args:
        setting: its name.
        sure: how sure the choice of this setting is.
        choices: its parts, those that decided first.
        notes: what else to know, such as too few episodes.
    """

    setting: Setting
    sure: Sure
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]


WEAK = Sure.WEAK
LABORATORY, TRIALS = "results/laboratory.md", "guides/advise.md"
LONG = Cited(LABORATORY, "Turns per environment", "64 turns over 8: +0.052 (+0.038 to +0.070), horizon 12")
SHORT = Cited(LABORATORY, "Turns per environment", "8 turns over 2: +0.105 (+0.098 to +0.117), horizon 12")
DUAL = Cited(LABORATORY, "Dual discount with a lure", "over one pair: +0.125 (+0.094 to +0.156), replies of 8 words")
NO_LURE = Cited(
    LABORATORY, "Dual discount without a lure", "over one pair: -0.087 (-0.132 to -0.058), replies of 4 words"
)
WARM = Cited(
    LABORATORY, "Critic warm-up, cut at 2 turns", "random head, warm-up over random head: +0.259 (+0.074 to +0.383)"
)
ZERO = Cited(
    LABORATORY, "Critic warm-up, cut at 2 turns", "zero head over random head, warm-up: +0.188 (+0.057 to +0.372)"
)
BY_GROUPS = Cited(
    LABORATORY,
    "A critic against groups",
    "GiGPO over GRPO: +0.021 (+0.017 to +0.024), horizon 12; of GRPO over GAE with cuts of 8 turns nothing was seen",
)
BY_STATE = Cited(TRIALS, "Trials", "at equal sampled turns GiGPO 0.78, GAE 0.67, horizon 24")
SPREAD = Cited("estimators.md", "GRPO", "where all scores of a group are equal, the advantage is 0")


def advise(facts: Facts) -> Advice:
    """Return one of six settings for a task, from what was measured of it."""
    against = next(_against_groups(facts), None)
    if against is None or facts.whole_games:
        setting, choices = _of_groups(facts)
    else:
        setting, choices = _of_a_critic(facts, against)
    few = facts.episodes < LEAST_EPISODES or facts.shared_starts < LEAST_STARTS
    deciding = [one.sure for one in choices if one.decides]
    sure = Sure.GUESS if few else max(deciding, key=list(Sure).index)  # the least sure
    return Advice(setting, sure, tuple(choices), tuple(_notes(facts, setting, few)))


def _against_groups(facts: Facts) -> Iterator[Choice]:
    """Yield why groups of whole episodes do not suit, the gravest reason first."""
    if facts.whole_games:
        return

    def critic(why: str, sure: Sure, source: Cited | None = None) -> Choice:
        return Choice("estimator", "DualDiscountGAE", why, sure, source, decides=True)

    if not facts.shared_starts:
        yield critic("no start was played twice, so nothing is known of groups", Sure.GUESS)
    elif facts.begin_alike.value < 1:
        alike = f"{percent(facts.begin_alike)} of the starts"
        yield critic(f"the same seed does not begin the same episode ({alike} do), so a group has no one start", WEAK)
    if not _ends(facts):
        yield critic(
            f"{facts.unended} of {facts.episodes} episodes did not end while they were watched, and groups are whole "
            "episodes",
            WEAK,
        )
    if not _returns_differ(facts):
        yield critic("all episodes returned the same, so a group would have nothing to compare", Sure.GUESS)
    if facts.mixed.value < LEAST_MIXED and not within_share(facts) >= LEAST_WITHIN:  # nor where nothing tells it
        yield critic(
            f"the start decides the return: in only {percent(facts.mixed)} of the starts did episodes return "
            "differently, so most groups would teach nothing; a critic compares across starts",
            WEAK if facts.mixed.high < LEAST_MIXED else Sure.GUESS,
            SPREAD,
        )
    if GROUP * facts.mean_turns > facts.iteration_turns * 1.5:
        yield critic(
            f"a group of {GROUP} episodes takes about {GROUP * facts.mean_turns:.0f} turns, and an iteration has "
            f"{facts.iteration_turns}",
            Sure.GUESS,
        )
    dense = facts.told_apart.value >= LEAST_DENSE and facts.on_the_way.value >= 0.5
    explains = facts.explained.low >= LEAST_EXPLAINED
    recurs = facts.met_in_others.value >= LEAST_MET
    if dense and (explains or not recurs):
        helped = f"a quick critic explains {facts.explained.value:.2f} of the returns of new starts" if explains else ""
        yield critic(
            f"{percent(facts.told_apart)} of the turns have a reward of their own, mostly on the way, and "
            f"{helped or 'states hardly recur'}; one number per episode would mix what each turn earned",
            Sure.GUESS,
        )
    if facts.horizon[0] > LONG_EPISODE and not recurs:
        yield critic(
            f"episodes have {_median_turns(facts)} and hardly meet in a state, so a group would give all of them "
            "one number",
            Sure.GUESS,
        )


def _of_groups(facts: Facts) -> tuple[Setting, list[Choice]]:
    met, mixed = facts.met_in_others, facts.mixed
    differ = f"returns differ in {percent(mixed)} of the starts"
    whole = "the interaction plays whole games only"  # the one reason where no return differs
    compared = f"{differ} with {PLAYED} episodes already" if _returns_differ(facts) else f"{whole}; so many were tried"
    tried = facts.horizon[1] <= LONG_EPISODE and facts.reply_tokens[0] <= LONG_REPLY and mixed.low >= LEAST_MIXED
    near = facts.horizon[0] <= NEAR
    size = Choice("group size", f"{GROUP} whole episodes", compared, WEAK, BY_GROUPS)
    cut = Choice("cut", "none", "a group plays its episodes to their end", Sure.STRONG)
    warm = Choice("warm-up", "none", "there is no critic", Sure.STRONG)
    if met.value >= LEAST_MET:
        why = f"{percent(met)} of the turns after the first are in a state that another episode of the start also met, "
        why += f"and {differ if _returns_differ(facts) else whole}"
        sure = WEAK if tried and not met.low < LEAST_MET else Sure.GUESS
        source = BY_GROUPS if near else BY_STATE
        estimator = Choice("estimator", "GiGPO", why, sure, source, decides=True)
        discounts = Choice("discounts", "gamma 0.99", "ranks the ways from a state by their length too", WEAK, source)
        return Setting.GROUPS_BY_STATE, [estimator, discounts, size, cut, warm]
    why = f"{differ}, and " + (
        f"states hardly recur ({percent(met)})" if facts.horizon[1] > 1 else "episodes have one turn"
    )
    if not _returns_differ(facts):
        why = whole
    estimator = Choice("estimator", "GRPO", why, Sure.GUESS, BY_GROUPS, decides=True)
    discounts = Choice("discounts", "none", "a group compares sums of rewards", Sure.STRONG, SPREAD)
    return Setting.GROUPS, [estimator, discounts, size, cut, warm]


def _of_a_critic(facts: Facts, against: Choice) -> tuple[Setting, list[Choice]]:
    words = facts.reply_tokens[0]
    discounts = Choice(
        "discounts",
        ".99/.95, 1/1 within a turn",
        f"replies have {words:g} tokens, and one discount per token would count each of them against a far reward; "
        "where no nearer one competes with it, one pair learned faster"
        if words > 1
        else "replies have one token, so a pair per token would be the same",
        WEAK,
        DUAL if words >= LONG_REPLY else NO_LURE,
    )
    size = Choice("group size", "no groups", "a critic stands for the comparison", against.sure)
    estimator = against
    if facts.first_values > 0:
        warm = Choice(
            "warm-up",
            f"{WARMUP_ROUNDS} rounds",
            f"the values of the untrained critic are not 0 but up to {facts.first_values:.2g}; a head of zeros, "
            "which the package's critics have, would need none",
            Sure.STRONG,
            WARM,
            decides=True,
        )
        cut = Choice(
            "cut", f"{SHORT_CUT} turns", "as the setting has it; longer cuts forgive a bad critic", WEAK, SHORT
        )
        return Setting.WARM_UP, [estimator, warm, discounts, cut, size]
    warm = Choice("warm-up", "none", "the critic begins with values of 0", WEAK, ZERO)
    if facts.horizon[0] <= VERY_SHORT and _ends(facts):
        cut = Choice(
            "cut",
            f"{SHORT_CUT} turns",
            f"a median episode has {_median_turns(facts)}, so a short cut holds it, and more environments play at "
            "a time",
            Sure.GUESS,
            SHORT,
            decides=True,
        )
        return Setting.SHORT_CUTS, [estimator, cut, discounts, size, warm]
    cut = Choice(
        "cut",
        f"{LONG_CUT} turns",
        f"a median episode has {_median_turns(facts)}, so a cut at {SHORT_CUT} leaves the credit of a reward to "
        "a critic that knows nothing yet",
        Sure.STRONG if facts.horizon[0] >= SHORT_CUT and facts.on_the_way.value < 0.5 else WEAK,
        LONG,
        decides=True,
    )
    return Setting.LONG_CUTS, [estimator, cut, discounts, size, warm]


def _notes(facts: Facts, setting: Setting, few: bool) -> Iterator[str]:
    if few:
        yield (
            f"not enough episodes: {facts.episodes} in {facts.shared_starts} starts that were played several times; "
            f"give at least {LEAST_STARTS * PLAYED} (--episodes)"
        )
    if not _returns_differ(facts):
        yield (
            "no setting learns to return more while every episode returns the same: change the task, or, where none "
            "succeeds, let the model learn by example first (agentrl clone)"
        )
    if facts.lost:
        yield f"{facts.lost} episodes were lost to faults of the environment and are left out"
    grouped = setting in (Setting.GROUPS, Setting.GROUPS_BY_STATE)
    if grouped and _returns_differ(facts):
        yield "groups were tried against a critic with cuts of 8 turns, not against one with long cuts"
    if grouped and _returns_differ(facts) and facts.mixed.value < LEAST_MIXED:
        yield (
            "few starts had returns that differ, so an iteration of few groups may teach nothing: play more of them, "
            "or let the model learn by example first (agentrl clone)"
        )
    if facts.repeats.value < 1:
        yield (
            "the environment does not repeat an episode from its seed and actions, so runs cannot be repeated, nor "
            "resumed exactly (agentrl check-env)"
        )
    if facts.uncertain.value >= 0.2:
        yield (
            f"equal actions in equal states led to different outcomes in {percent(facts.uncertain)} of the cases: "
            "chance, or an observation that does not tell the state"
        )
    if facts.met_again.value >= 0.5:
        yield (
            f"{percent(facts.met_again)} of the turns come back to a state of their episode: the policy goes in "
            "circles, which a memory of more turns may help"
        )
    if facts.horizon[1] > LONG_CUT:
        yield f"one in ten episodes is longer than a cut of {LONG_CUT} turns; an even longer one was not tried"
    if facts.whole_games:
        yield "the interaction plays whole games only, so the settings without groups were not considered"


def _ends(facts: Facts) -> bool:
    return facts.unended <= (1 - LEAST_ENDED) * facts.episodes


def _median_turns(facts: Facts) -> str:
    left = "at least " if 2 * facts.unended >= facts.episodes else ""  # they were watched no longer
    return f"{left}{facts.horizon[0]:g} turn{'s' * (facts.horizon[0] != 1)}"


def _returns_differ(facts: Facts) -> bool:
    return facts.above_least.value > 0


def within_share(facts: Facts) -> float:
    """Return the share of the variance of returns that lies within starts; not a number where there is none."""
    whole = facts.between + facts.within
    return facts.within / whole if whole > 0 else math.nan


def percent(measured: Measured) -> str:
    """Return a share in words."""
    return "an unknown share" if math.isnan(measured.value) else f"{100 * measured.value:.0f} %"
