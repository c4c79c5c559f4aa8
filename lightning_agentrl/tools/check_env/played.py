"""Checks of properties of all played episodes, and the texts that a small model needs for training."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from lightning_agentrl.tools.check_env.findings import Log
from lightning_agentrl.tools.check_env.probe import TURNS, Clock
from lightning_agentrl.tools.check_env.seen import Play
from lightning_agentrl.tools.check_env.texts import words

SLOW_STEP, SLOW_RESET = 0.2, 1.0  # seconds
GROWTH = 150.0  # characters per turn
_MOSTLY = 0.5
_CHANCE = 1e-3  # probability that independent returns never differ within a seed
_RARER = 0.2  # smallest share of the rarer return for the test of `_CHANCE`


def check_spread(log: Log, episodes: Sequence[Play], others: Sequence[Play]) -> None:
    """Check that returns of random episodes differ, between episodes and within seeds."""
    whole = [one for one in episodes if not one.broken and one.actions]
    returns = Counter(round(one.total, 9) for one in whole)
    elsewhere = {round(one.total, 9) for one in others if not one.broken and one.actions} - set(returns)
    if len(whole) < 8:
        return
    cut = all(one.seen[-1].truncated for one in whole)
    failed = all(one.seen[-1].success is False for one in whole)
    less = max(returns) <= max(elsewhere, default=-math.inf)
    if set(returns) == {0.0} or (len(returns) == 1 and (cut or failed or less)):
        log.add("learn.floor", f"{len(whole)} random episodes earn {'nothing' if not whole[0].total else 'the same'}")
        return
    if len(returns) == 1 and all(one.seen[-1].success for one in whole):
        log.add("learn.ceiling", f"{len(whole)} random episodes all succeed")
        return
    if _share(seen.invalid is True for one in whole for seen in one.seen[1:]) > _MOSTLY:
        return
    by_seed = defaultdict(list)
    for one in whole:
        by_seed[one.seed].append(round(one.total, 9))
    rarer = 1 - max(returns.values()) / len(whole)
    chance = math.prod(rarer ** len(found) + (1 - rarer) ** len(found) for found in by_seed.values())
    never = all(len(set(found)) == 1 for found in by_seed.values())
    if never and (len(returns) == 1 or (rarer >= _RARER and chance < _CHANCE)):
        said = f"{len(whole)} random episodes on {len(by_seed)} seeds: those of one seed all earn the same"
        log.add("reward.spread", f"{said} ({', '.join(f'{value:g}' for value in list(returns)[:4])})", whole[0].seed)


def check_ends(log: Log, episodes: Sequence[Play], limit: int | None) -> None:
    """Check that episodes end, and that terminated and truncated are reported correctly.

    Args:
        log: log for findings.
        episodes: episodes of all policies.
        limit: declared limit of turns; None without a declared limit.
    """
    whole = [one for one in episodes if one.over and not one.broken]
    if not whole:
        longest = max((len(one.actions) for one in episodes), default=0)
        if longest >= min(limit or TURNS, TURNS) and (limit is None or limit < TURNS):
            log.add("ends.never", f"no episode of {len(episodes)} ends within {longest} turns", episodes[0].seed)
        return
    longest = max(len(one.actions) for one in whole)
    last = [one for one in whole if len(one.actions) == longest]
    lost = all(one.seen[-1].terminated and one.seen[-1].reward <= 0 and not one.seen[-1].success for one in last)
    if longest > 1 and lost and len(last) >= 8 and len({one.policy for one in last}) >= 2:
        said = f"{len(last)} episodes of several policies end terminated, without reward, after exactly {longest} turns"
        if longest != limit:  # the limit may also be a number of lives or questions
            log.milder["ends.limit"] = "notice"
        log.add("ends.limit", said, last[0].seed, last[0].actions)
    early = [one for one in whole if one.seen[-1].truncated and len(one.actions) < (limit or longest)]
    for one in early:
        if one.seen[-1].reward > 0 and one.seen[-1].success is not False:
            said = f"the episode ends truncated at turn {len(one.actions)} with a reward of {one.seen[-1].reward:g}"
            log.add("ends.win", said, one.seed, one.actions)
        elif limit is not None:
            said = f"the episode is truncated at turn {len(one.actions)}, but {limit} turns are declared"
            log.add("ends.early", said, one.seed, one.actions)
    again = [one for one in whole if len(one.actions) > 1 and _moved(one) and not one.seen[-1].invalid]
    if len(again) >= 4 and _share(one.seen[-1].state == one.seen[0].state for one in again) > 0.8:
        said = f"the last text of {len(again)} episodes equals their first text"
        log.add("ends.restart", said, again[0].seed, again[0].actions)


def check_longest(log: Log, episodes: Sequence[Play], limit: int | None) -> None:
    """Check that no episode exceeds the declared limit of turns."""
    for one in episodes:
        if limit is not None and len(one.actions) > limit:
            said = f"the episode continues at turn {limit + 1}, but {limit} turns are declared"
            log.add("ends.declared", said, one.seed, one.actions[: limit + 1])


def check_success(log: Log, episodes: Sequence[Play]) -> None:
    """Check that episodes reported as successes have higher returns than other episodes."""
    whole = [one for one in episodes if one.over and not one.broken and one.seen[-1].success is not None]
    for one in episodes:
        if one.seen and one.seen[0].success:
            log.add("info.success", "info['success'] is true after reset", one.seed)
    won = [one for one in whole if one.seen[-1].success]
    lost = [one for one in whole if not one.seen[-1].success]
    if len(won) >= 3 and len(lost) >= 3 and max(one.total for one in won) < min(one.total for one in lost):
        best, worst = max(one.total for one in won), min(one.total for one in lost)
        said = f"every success earns at most {best:g}, every failure at least {worst:g}"
        log.add("reward.success", said, won[0].seed, won[0].actions)
    for one in won:
        if one.seen[-1].info.get("progression", 1) == 0:
            log.add("info.progression", "info['progression'] is 0 at a success", one.seed, one.actions)
    paid = [one for one in lost if one.seen[-1].terminated and one.seen[-1].reward > 0]
    paid = [one for one in paid if not 0 < one.progression < 1]  # partial progress may be rewarded
    if len(paid) >= 3 and not won and len({round(one.total, 6) for one in whole}) > 1:
        richest = max(paid, key=lambda one: one.total)
        said = f"no episode is reported as a success, not even one whose last reward is {richest.seen[-1].reward:g}"
        log.add("info.success", said, richest.seed, richest.actions)


def check_texts(log: Log, episodes: Sequence[Play]) -> None:
    """Check that texts change with the game, without delay, and do not grow in every turn."""
    several = [one for one in episodes if len(one.seen) >= 4]
    if len(several) >= 4:
        first = several[0]
        if not any(_moved(one) for one in several):
            log.add("text.constant", "the text never changes within an episode", first.seed, first.actions[:5])
        elif all(one.seen[1].state == one.seen[0].state for one in several):
            moving = _share(_moved(one) for one in several)
            if moving > _MOSTLY and _lags(several):
                said = "the text after the first action is always the first text, so texts are one turn late"
                log.add("text.stale", said, first.seed, first.actions[:2])
    long = [one for one in episodes if len(one.seen) >= 6]
    if long:
        growth = statistics.median((len(one.seen[-1].text) - len(one.seen[0].text)) / len(one.actions) for one in long)
        if growth > GROWTH:
            log.add("text.grows", f"texts grow by {growth:.0f} characters per turn", long[0].seed, long[0].actions[:6])


def check_repeated(log: Log, episodes: Sequence[Play]) -> None:
    """Check that the same move between the same observations is not rewarded repeatedly."""
    for one in episodes:
        if not one.actions or all(seen.reward > 0 for seen in one.seen[1:-1]):
            continue
        paid: Counter[tuple[str, str, str]] = Counter()
        for before, action, after in zip(one.seen, one.actions, one.seen[1:], strict=False):
            paid[before.state, action, after.state] += after.reward > 0
        if paid and max(paid.values()) >= 3:
            log.add(
                "reward.repeated", f"a move is rewarded {max(paid.values())} times in an episode", one.seed, one.actions
            )
            return


def check_times(log: Log, clock: Clock) -> None:
    """Check that steps and resets are not too slow for rollouts."""
    steps, resets = sorted(clock.times["step"]), clock.times["reset"]
    figures = log.figures
    if steps:
        tail = steps[min(int(0.99 * len(steps)), len(steps) - 1)]
        figures["step_seconds"] = {"median": statistics.median(steps), "p99": tail, "longest": steps[-1]}
        if tail > SLOW_STEP and sum(step > SLOW_STEP for step in steps) >= 2:
            log.add(
                "time.step", f"one step in a hundred takes {tail:.2g} s or more (median {statistics.median(steps):.2g})"
            )
    if resets:
        figures["reset_seconds"] = {"median": statistics.median(resets), "longest": max(resets)}
        if statistics.median(resets) > SLOW_RESET:
            log.add("time.reset", f"a reset takes {statistics.median(resets):.2g} s (median)")


def check_memory_needed(log: Log, episodes: Sequence[Play]) -> None:
    """Check whether the last observation and the action determine the next observation and reward."""
    followed: dict[tuple[str, str], dict[tuple[Any, ...], tuple[int, list[str]]]] = defaultdict(dict)
    visits: Counter[tuple[str, str]] = Counter()
    for one in episodes:
        for turn, action in enumerate(one.actions[: len(one.seen) - 1]):
            place = f"{one.seen[turn].contract.system_prompt}\n{one.seen[turn].state}", action
            visits[place] += 1
            after = one.seen[turn + 1]
            followed[place].setdefault(
                (after.state, after.reward, after.terminated), (one.seed, one.actions[: turn + 1])
            )
    often = [place for place, count in visits.items() if count > 1]
    if not often:
        return
    open_places = [place for place in often if len(followed[place]) > 1]
    share = len(open_places) / len(often)
    log.figures["memory_needed"] = {"pairs": len(often), "share": share}
    if open_places and share >= 0.02:
        seed, actions = list(followed[open_places[0]].values())[1]
        what = f"of {len(often)} repeated pairs of text and action, {share:.0%} have several outcomes"
        said = f"{what}: by chance, or because of earlier turns"
        log.add("memory.needed", said, seed, actions)


def describe(log: Log, episodes: Sequence[Play]) -> None:
    """Record statistics of random play."""
    whole = [one for one in episodes if one.seen and not one.broken]
    if not whole:
        return
    lengths, returns = [len(one.actions) for one in whole], [one.total for one in whole]
    texts = [len(seen.text) for one in whole for seen in one.seen]
    won = [one.seen[-1].success for one in whole if one.seen[-1].success is not None]
    invalid = [seen.invalid for one in whole for seen in one.seen[1:] if seen.invalid is not None]
    log.figures |= {
        "episodes": len(whole),
        "turns": {"mean": statistics.fmean(lengths), "longest": max(lengths)},
        "random_return": {"mean": statistics.fmean(returns), "least": min(returns), "most": max(returns)},
        "text_characters": {
            "first": len(whole[0].seen[0].text),
            "median": statistics.median(texts),
            "longest": max(texts),
        },
        "system_prompt_characters": len(whole[0].seen[0].contract.system_prompt),
        "actions": len(whole[0].seen[0].contract.actions),
        "ended": _share(one.over for one in whole),
    }
    if won:
        log.figures["random_success"] = _share(bool(one) for one in won)
    if invalid:
        log.figures["random_invalid"] = _share(invalid)


def _moved(one: Play) -> bool:
    return any(seen.state != one.seen[0].state for seen in one.seen[1:])


def _lags(episodes: Sequence[Play]) -> bool:
    """Return whether the episodes have several first actions and seeds, as evidence that texts lag behind."""
    return len({one.actions[0] for one in episodes}) > 1 and len({one.seed for one in episodes}) > 1


def _share(flags: Any) -> float:
    found = [bool(flag) for flag in flags]
    return sum(found) / len(found) if found else 0.0


_WORDS = 1500  # size of the small model's vocabulary


def texts(random: Sequence[Play], solved: Sequence[Play], named: bool) -> dict[str, Any]:
    """Return the texts of the environment that a small model needs, and the returns of random replies.

    Args:
        random: episodes with random replies.
        solved: episodes of the scripted player.
        named: whether the environment names its actions.
    """
    seen = [one for play in [*random, *solved] if not play.broken for one in play.seen]
    system = system_of({(one.contract.system_prompt, one.contract.mission) for one in seen})
    read = [one.prompt if system is None else f"{one.contract.mission if system else ''}\n{one.text}" for one in seen]
    return {
        "words": [word for word, _ in Counter(word for text in read for word in words(text)).most_common(_WORDS)],
        "replies": list(dict.fromkeys(reply for one in seen[:200] for reply in one.legal())),
        "named": named,
        "system": system,
        "longest": max((len(words(text)) for text in read), default=0),
        "returns": [play.total for play in random if not play.broken],
    }


def system_of(said: Collection[tuple[str, str]]) -> str | None:
    """Return the argument ``system`` of `PromptFormat` for a small model, without text that is equal in all episodes.

    Args:
        said: pairs of system prompt and mission of the episodes.

    Returns:
        Empty if all system prompts are equal, ``{mission}`` if they differ only in the mission, or None for the
        environment's whole system prompt.
    """
    if len({prompt for prompt, _ in said}) < 2:
        return ""
    rest = {prompt.replace(mission, "{mission}") if mission else prompt for prompt, mission in said}
    return "{mission}" if len(rest) == 1 else None
