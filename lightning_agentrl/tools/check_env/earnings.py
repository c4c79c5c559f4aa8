"""Checks of the rewards of policies that ignore the task, of the published answer, and of the scripted player."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from lightning_agentrl.tools.check_env.findings import Log
from lightning_agentrl.tools.check_env.probe import BrokenError, Probe
from lightning_agentrl.tools.check_env.seen import Play, Seen
from lightning_agentrl.tools.check_env.texts import CLAIMS, CONSTANTS, shown

Choose = Callable[[list[Seen]], str]
ANSWERS = ("answer", "solution", "oracle_answer", "expected_answer", "correct_answer", "ground_truth", "label")
SECRETS = ("secret", "password", "hidden", *ANSWERS)
FORMS = ("{}", "[{}]", "Answer: {}", "\\boxed{{{}}}", "<answer>{}</answer>")
_LITTLE, _MUCH, _MORE = 0.05, 0.5, 0.2  # shares of the best return
_CONTEXT = 10  # number of characters before a leaked value that are compared between texts


@dataclass(frozen=True)
class Earned:
    """Episodes of a policy and their returns."""

    policy: str
    kind: str
    episodes: Sequence[Play]

    @property
    def mean(self) -> float:
        return statistics.fmean(one.total for one in self.episodes) if self.episodes else 0.0

    @property
    def surely(self) -> float:
        """The mean minus two standard errors."""
        if len(self.episodes) < 2:
            return -math.inf
        return self.mean - 2 * statistics.stdev(one.total for one in self.episodes) / math.sqrt(len(self.episodes))


def policies(first: Seen) -> list[tuple[str, str, Choose]]:
    """Return kind, name and choice function of each policy that ignores the game."""
    named = list(first.contract.actions)
    legal = first.legal()
    found: list[tuple[str, str, Choose]] = [
        ("gaming.empty", "empty", lambda seen: ""),
        ("gaming.copy", "copies the text", lambda seen: seen[-1].text),
        ("gaming.copy", "copies the system prompt", lambda seen: seen[-1].contract.system_prompt),
        ("gaming.copy", "names everything", lambda seen: ", ".join(seen[-1].legal()[:200])),
        ("gaming.copy", "names everything in the order", lambda seen: "\n".join(seen[-1].legal()[:200])),
    ]
    found += [("gaming.hostile", f"says {shown(claim, 30)!r}", _always(claim)) for claim in CLAIMS]
    found += [
        ("gaming.constant", "takes the first that is offered", lambda seen: seen[-1].legal()[0]),
        ("gaming.constant", "takes the last that is offered", lambda seen: seen[-1].legal()[-1]),
    ]
    constants = named[:12] or [*legal[:12], *(CONSTANTS if first.contract.one_turn or len(legal) > 12 else ())]
    pairs = combinations(named[:4], 2)  # pairs have no separate check; their episodes feed `check_repeated`
    found += [("gaming.constant", f"always {shown(one, 30)!r}", _always(one)) for one in constants]
    return found + [("", f"alternates {one!r} and {other!r}", _turns(one, other)) for one, other in pairs]


def _turns(one: str, other: str) -> Choose:
    return lambda seen: (one, other)[len(seen) % 2]


def _always(reply: str) -> Choose:
    return lambda seen: reply


def play_policy(
    probe: Probe, policy: tuple[str, str, Choose], seeds: Sequence[int], spent: Callable[[], bool]
) -> Earned:
    """Play one whole episode per seed with a policy, until the time is used up."""
    kind, name, choose = policy
    episodes: list[Play] = []
    for seed in seeds:
        if spent() and episodes:
            break
        episode = probe.play(seed, name, choose)
        if not episode.broken:
            episodes.append(episode)
    return Earned(name, kind, episodes)


def full_return(episodes: Sequence[Play]) -> float:
    """Estimate the return of solving the task: the best return, scaled up if its episode had partial progress."""
    best = max(episodes, key=lambda one: one.total, default=None)
    if best is None or best.total <= 0:
        return 1.0
    return best.total / best.progression if 0 < best.progression < 1 else best.total


def suspicious(earned: Earned, best: float) -> bool:
    """Return whether a policy earns enough to justify more episodes."""
    return earned.mean > _LITTLE * best


def judge(log: Log, earned: Earned, random_mean: float, best: float, honest: float, one_turn: bool) -> None:
    """Add a finding if a policy that ignores the game earns too much.

    Args:
        log: log for the finding.
        earned: episodes of the policy.
        random_mean: mean return of random legal replies.
        best: return of solving the task, which counts as 1.
        honest: mean return of the default action, if the environment reports the replies as invalid, or -inf.
        one_turn: whether episodes have one turn and accept any text.
    """
    mean, sure = earned.mean / best, earned.surely / best
    random_mean, honest = random_mean / best, honest / best
    if not earned.episodes or mean <= honest + 0.02:
        return
    if earned.kind == "gaming.constant":
        wrong = sure > _MUCH and (one_turn or mean > random_mean + _MORE)
    elif one_turn and earned.kind != "gaming.copy":
        wrong = sure > _LITTLE
    elif one_turn:
        wrong = sure > _MUCH
    else:
        wrong = (mean >= _MUCH and sure > random_mean) or (sure > _LITTLE and mean >= 0.9 * random_mean)
    if wrong:
        example = max(earned.episodes, key=lambda one: one.total)
        said = f"a policy that {_verb(earned.policy)} earns {earned.mean:.3g} in {len(earned.episodes)} episodes; "
        log.add(earned.kind, f"{said}random play {random_mean * best:.3g}", example.seed, example.actions)


def _verb(name: str) -> str:
    return f"says {name}" if name.startswith(("always", "empty")) else name


def published(probe: Probe, seen: Seen) -> str | None:
    """Return the answer that an environment publishes for this episode, in info or an attribute, or None."""
    for _, source in _places(probe.unwrapped(), seen):
        for name in ANSWERS:
            value = source.get(name)
            if isinstance(value, str | int | float) and not isinstance(value, bool) and (text := _written(value)):
                return text
    return None


def check_answer(probe: Probe, seeds: Sequence[int]) -> None:
    """Check that the published answer of one-turn episodes earns the full reward."""
    earned: dict[str, list[float]] = {form: [] for form in FORMS}
    worst: dict[str, tuple[float, int, str]] = {}
    with suppress(BrokenError):
        for form in FORMS:
            for seed in seeds:
                answer = published(probe, probe.reset(seed))
                if answer is None:
                    return
                reply = form.format(answer)
                seen = probe.step(reply)
                earned[form].append(seen.reward)
                worst[form] = min(worst.get(form, (math.inf, 0, "")), (seen.reward, seed, reply))
            if min(earned[form]) >= 0.999:
                probe.log.figures["answer_return"] = 1.0
                return
        form = max(FORMS, key=lambda one: statistics.fmean(earned[one]))
        reward, seed, reply = worst[form]
        probe.log.figures["answer_return"] = mean = statistics.fmean(earned[form])
        said = f"the published answer earns {mean:.3g} on {len(seeds)} seeds, and {reward:g} here"
        probe.log.add("oracle.max", said, seed, [reply])


def check_leak(probe: Probe, seeds: Sequence[int], best: float) -> None:
    """Check that the first text does not contain the answer, always after the same characters."""
    with suppress(BrokenError):
        rows = []
        for seed in seeds:
            first = probe.reset(seed)
            rows.append((first.prompt, _hidden(probe.unwrapped(), first)))
        names = set.intersection(*(set(row) for _, row in rows)) if rows else set()
        for name in sorted(names):
            values = [row[name] for _, row in rows]
            if len(set(values)) < 3 or not (context := _common_context(rows, name)):
                continue
            strict = name.rsplit(".", 1)[-1].strip("_") in SECRETS
            if strict or _wins(probe, seeds, name, best):
                said = f"the first text contains the value of {name!r}, after {context!r}"
                probe.log.add("leak.answer", f"{said}: {shown(values[0])!r} with seed {seeds[0]}", seeds[0])
                return


def check_plan(log: Log, solved: Sequence[Play]) -> None:
    """Check that the first text does not contain the moves of the scripted player."""
    leaking = [one for one in solved if len(one.actions) >= 3 and _plan_stands(one)]
    long = [one for one in solved if len(one.actions) >= 3]
    if len(long) >= 3 and len(leaking) >= 0.9 * len(long) and len({tuple(one.actions) for one in long}) >= 3:
        log.add(
            "leak.answer",
            "the first text contains the moves of the scripted player",
            leaking[0].seed,
            leaking[0].actions,
        )


def _plan_stands(one: Play) -> bool:
    text = "".join(char if char.isalnum() else " " for char in one.seen[0].prompt.lower())
    plan = "".join(char if char.isalnum() else " " for char in " ".join(one.actions).lower())
    return " ".join(plan.split()) in " ".join(text.split())


def _common_context(rows: Sequence[tuple[str, dict[str, str]]], name: str) -> str:
    """Return the characters before a value that are equal in at least 90 % of the texts; may be empty."""
    contexts: Counter[str] = Counter()
    for text, row in rows:
        value, at, here = row[name], -1, set()
        while (at := text.find(value, at + 1)) >= 0:
            after = text[at + len(value) : at + len(value) + 1]
            if at >= _CONTEXT and not (after.isalnum() and value[-1].isalnum()) and not text[at - 1].isalnum():
                here.add(text[at - _CONTEXT : at])
        contexts.update(here)
    context, count = contexts.most_common(1)[0] if contexts else ("", 0)
    follows = sum(text.split(context, 1)[1].startswith(row[name]) for text, row in rows if context and context in text)
    return context if count >= 0.9 * len(rows) and follows >= 0.9 * len(rows) else ""


def _wins(probe: Probe, seeds: Sequence[int], name: str, best: float) -> bool:
    """Return whether a hidden value, sent as the reply, wins at once on most seeds."""
    won = 0
    for seed in seeds:
        for form in FORMS[:2]:
            value = _hidden(probe.unwrapped(), probe.reset(seed)).get(name, "")
            seen = probe.step(form.format(value))
            if seen.reward >= 0.9 * best and (seen.terminated or seen.success):
                won += 1
                break
    return won >= 0.8 * len(seeds)


def _attributes(env: Any) -> dict[str, Any]:
    return {name.strip("_"): value for name, value in getattr(env, "__dict__", {}).items()}


def _places(env: Any, seen: Seen) -> list[tuple[str, Mapping[str, Any]]]:
    """Return info, the attributes of an environment, and attributes of its objects, each dictionary with a prefix."""
    own = _attributes(env)
    inner = [
        (f"{name}.", {key: item for key, item in value.items() if isinstance(key, str)})
        if isinstance(value, Mapping)
        else (f"{name}.", _attributes(value))
        for name, value in own.items()
        if isinstance(value, Mapping) or hasattr(value, "__dict__")
    ]
    info = {key: item for key, item in seen.info.items() if isinstance(key, str)}
    return [("info.", info), ("", own), *inner]


def _written(value: str | float) -> str:
    """Return a value as text; empty for an integer with more digits than Python formats."""
    try:
        return str(value)
    except ValueError:
        return ""


def _hidden(env: Any, first: Seen) -> dict[str, str]:
    """Return short texts and integers in the attributes of an environment and of its objects, by name."""
    found: dict[str, str] = {}
    for prefix, values in _places(env, first):
        for name, value in values.items():
            plain = isinstance(value, str | int) and not isinstance(value, bool)
            if plain and 1 <= len(text := _written(value)) <= 40 and not name.endswith("_text"):
                found[f"{prefix}{name}"] = text
    return found


_SECONDS = 20.0  # time limit of creating the player, and of each reply
_WINS = 0.8  # smallest share of won levels without a finding
_PAID = 3  # smallest number of wins whose returns are compared


def play_levels(probe: Probe, levels: int, turns: int, spent: Callable[[], bool], episodes: list[Play]) -> bool:
    """Play the first seeds with the scripted player.

    Args:
        probe: instance of the environment.
        levels: number of seeds to play.
        turns: largest number of turns of an episode.
        spent: function that returns whether the time is used up; at least one level is played.
        episodes: list to which the played episodes are appended.

    Returns:
        Whether the environment has a player, and neither player nor environment failed.
    """
    for seed in range(levels):
        if spent() and episodes:
            probe.log.cut["scripted player"] = f"{len(episodes)} of {levels} levels were played"
            break
        try:
            probe.reset(seed)
            maker = getattr(probe.unwrapped(), "solver", None)
            player = probe.call("solver", "solver", maker, _SECONDS, "solver.raises") if callable(maker) else None
        except BrokenError:
            return False
        episode = None if player is None else _played(probe, seed, turns)
        if episode is None:
            return False
        episodes.append(episode)
    return True


def judge_player(log: Log, episodes: Sequence[Play], random_mean: float, enough: int) -> None:
    """Check that the scripted player wins, and that a win earns more than random play.

    Args:
        log: log for findings.
        episodes: at least one episode of the player.
        random_mean: mean return of random play.
        enough: smallest number of levels for a finding about too few wins.
    """
    wins = [_won(one) for one in episodes]
    log.figures["solver"] = {
        "levels": len(wins),
        "won": sum(wins),
        "turns": statistics.fmean(len(one.actions) for one in episodes),
        "return": statistics.fmean(one.total for one in episodes),
    }
    if len(wins) >= enough and sum(wins) < _WINS * len(wins):
        lost = episodes[wins.index(False)]
        idle = lost.seen[0].contract.default_action
        gave_up = all(set(one.actions) == {idle} for one, win in zip(episodes, wins, strict=True) if not win)
        if gave_up or not any(wins):  # the player found no solution, or does not aim for a success
            log.milder["solver.levels"] = "notice"
        said = f"the scripted player wins {sum(wins)} of {len(wins)} levels"
        log.add("solver.levels", said, lost.seed, lost.actions)
    paid = sorted((one.total, place) for place, one in enumerate(episodes) if wins[place])
    if len(paid) >= _PAID and paid[0][0] <= min(random_mean, 0.0):
        least = episodes[paid[0][1]]
        said = f"an episode that the scripted player wins earns {least.total:g}, random play {random_mean:.3g}"
        log.add("reward.success", said, least.seed, least.actions)


def _played(probe: Probe, seed: int, turns: int) -> Play | None:
    """Play one episode with the scripted player; None if the player or the environment raises."""
    players: list[Any] = []

    def choose(seen: list[Seen]) -> str:
        if not players:
            players.append(probe.unwrapped().solver())
        return str(probe.call("the scripted player", "solver", players[0], _SECONDS, "solver.raises"))

    episode = probe.play(seed, "scripted", choose, turns)
    return None if episode.broken or not episode.actions else episode


def _won(episode: Play) -> bool:
    success = episode.seen[-1].success
    return episode.over and (episode.total > 0 if success is None else success)
