"""Every estimator once more, as loops over lists of Python floats, written from the formulas and not from the code.

An estimate of episodes is a list per episode of the advantage and the return of each of its action tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from statistics import mean, stdev
from typing import Any

from lightning_agentrl.advantages import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    AdvantageEstimator,
    BiLevelGAE,
    DrGRPO,
    DualDiscountGAE,
    Forked,
    GiGPO,
    MaxRL,
    OptimalTokenBaseline,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    TurnLeaveOneOut,
)
from tests.advantages.cases import Episode

Estimate = list[list[tuple[float, float]]]


# With a critic


def dual_discount(
    episodes: Sequence[Episode], gamma_step=0.99, lam_step=0.95, gamma_token=1.0, lam_token=1.0
) -> Estimate:
    out: Estimate = []
    for episode in episodes:
        tokens = [(visit.number, token) for visit in episode.visits for token in visit.tokens]
        advantages = [0.0] * len(tokens)
        for k in reversed(range(len(tokens))):
            turn, token = tokens[k]
            if k == len(tokens) - 1:
                after = 0.0 if episode.terminated else gamma_step * episode.bootstrap
                advantages[k] = token.reward + after - token.value
            else:
                same = tokens[k + 1][0] == turn
                gamma, lam = (gamma_token, lam_token) if same else (gamma_step, lam_step)
                delta = token.reward + gamma * tokens[k + 1][1].value - token.value
                advantages[k] = delta + gamma * lam * advantages[k + 1]
        out.append([(a, a + token.value) for a, (_, token) in zip(advantages, tokens, strict=True)])
    return out


def gae(episodes: Sequence[Episode], gamma=1.0, lam=1.0) -> Estimate:
    return dual_discount(episodes, gamma, lam, gamma, lam)


def bilevel(episodes: Sequence[Episode], gamma_turn=0.95, lam_turn=1.0, gamma_token=1.0, lam_token=1.0) -> Estimate:
    out: Estimate = []
    for episode in episodes:
        visits = episode.reached
        carried, following = 0.0, 0.0 if episode.terminated else episode.bootstrap
        by_turn: list[list[float]] = []
        for visit in reversed(visits):
            end = visit.tokens[-1]
            carried = end.reward + gamma_turn * following - end.value + gamma_turn * lam_turn * carried
            following = end.value
            inside = [carried]
            for t in reversed(range(len(visit.tokens) - 1)):
                token, behind = visit.tokens[t], visit.tokens[t + 1]
                delta = token.reward + gamma_token * behind.value - token.value
                inside.insert(0, delta + gamma_token * lam_token * inside[0])
            by_turn.insert(0, inside)
        advantages = [a for inside in by_turn for a in inside]
        out.append([(a, a + token.value) for a, token in zip(advantages, episode.tokens, strict=True)])
    return out


# One number per episode


def score(episode: Episode) -> float:
    return sum(token.reward for token in episode.tokens)


def are_equal(numbers: Sequence[float]) -> bool:
    """Up to the rounding of float32."""
    return max(numbers) - min(numbers) <= 1e-6 * max(abs(x) for x in numbers)


def grpo_of(numbers: Sequence[float], eps: float = 1e-6) -> list[float]:
    if are_equal(numbers):
        return [0.0] * len(numbers)
    return [(x - mean(numbers)) / (stdev(numbers) + eps) for x in numbers]


def dr_grpo_of(numbers: Sequence[float]) -> list[float]:
    return [0.0 if are_equal(numbers) else x - mean(numbers) for x in numbers]


def members(episodes: Sequence[Episode]) -> list[list[int]]:
    """The episodes with action tokens of each group."""
    labels = sorted({episode.group for episode in episodes if episode.tokens})
    return [[i for i, e in enumerate(episodes) if e.group == label and e.tokens] for label in labels]


def by_group(
    episodes: Sequence[Episode], compare: Callable[[list[Episode]], Sequence[float]], group_of_one: str = "zero"
) -> Estimate:
    out: Estimate = [[] for _ in episodes]
    for index in members(episodes):
        group = [episodes[i] for i in index]
        if len(group) == 1:
            advantages: Sequence[float] = [score(group[0]) if group_of_one == "raw" else 0.0]
        else:
            advantages = compare(group)
        for i, advantage in zip(index, advantages, strict=True):
            out[i] = [(advantage, score(episodes[i]))] * len(episodes[i].tokens)
    return out


def scores(group: Sequence[Episode]) -> list[float]:
    return [score(episode) for episode in group]


def grpo(episodes: Sequence[Episode], eps=1e-6, group_of_one="zero") -> Estimate:
    return by_group(episodes, lambda group: grpo_of(scores(group), eps), group_of_one)


def dr_grpo(episodes: Sequence[Episode], group_of_one="zero") -> Estimate:
    return by_group(episodes, lambda group: dr_grpo_of(scores(group)), group_of_one)


def rloo(episodes: Sequence[Episode], group_of_one="zero") -> Estimate:
    def compare(group: list[Episode]) -> list[float]:
        s, n = scores(group), len(group)
        return [0.0 if are_equal(s) else s[i] - (sum(s[:i]) + sum(s[i + 1 :])) / (n - 1) for i in range(n)]

    return by_group(episodes, compare, group_of_one)


def opo(episodes: Sequence[Episode], group_of_one="zero") -> Estimate:
    def compare(group: list[Episode]) -> list[float]:
        lengths = [len(episode.tokens) for episode in group]
        baseline = sum(k * s for k, s in zip(lengths, scores(group), strict=True)) / sum(lengths)
        return [0.0 if are_equal(scores(group)) else s - baseline for s in scores(group)]

    return by_group(episodes, compare, group_of_one)


def gpg(episodes: Sequence[Episode], group_of_one="zero") -> Estimate:
    groups = [[episodes[i] for i in index] for index in members(episodes)]
    total = sum(len(group) for group in groups)
    unequal = sum(len(group) for group in groups if not are_equal(scores(group)))
    return by_group(
        episodes, lambda group: [total / unequal * a if a else 0.0 for a in dr_grpo_of(scores(group))], group_of_one
    )


def pass_at_k(episodes: Sequence[Episode], divide_by_std=True, eps=1e-6, group_of_one="zero") -> Estimate:
    def compare(group: list[Episode]) -> list[float]:
        s = scores(group)
        first, second = sorted(s, reverse=True)[:2]
        lead = 0.0 if are_equal(s) else (first - second) / (stdev(s) + eps if divide_by_std else 1.0)
        return [lead if i == s.index(first) else 0.0 for i in range(len(s))]

    return by_group(episodes, compare, group_of_one)


def maxrl(episodes: Sequence[Episode], eps=1e-6, group_of_one="zero") -> Estimate:
    return by_group(
        episodes, lambda group: [a / (mean(scores(group)) + eps) for a in dr_grpo_of(scores(group))], group_of_one
    )


def gdpo(episodes: Sequence[Episode], weights=None, eps=1e-6, group_of_one="zero") -> Estimate:
    weights = weights or {"reward": 1.0}

    def dimension(episode: Episode, name: str) -> float:
        return score(episode) if name == "reward" else episode.reached[-1].metrics[name]

    out: Estimate = [[] for _ in episodes]
    for index in members(episodes):
        parts = {name: [dimension(episodes[i], name) for i in index] for name in weights}
        for place, i in enumerate(index):
            total = sum(weight * parts[name][place] for name, weight in weights.items())
            if len(index) == 1:
                advantage = total if group_of_one == "raw" else 0.0
            else:
                advantage = sum(weight * grpo_of(parts[name], eps)[place] for name, weight in weights.items())
            out[i] = [(advantage, total)] * len(episodes[i].tokens)
    return out


# Rewards to go


def to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def reinforce_plus_plus(episodes: Sequence[Episode], gamma=1.0) -> Estimate:
    return [[(g, g) for g in to_go([token.reward for token in e.tokens], gamma)] for e in episodes]


def remax(episodes: Sequence[Episode]) -> Estimate:
    return [[(g - e.greedy, g) for g in to_go([token.reward for token in e.tokens])] for e in episodes]


def turn_rewards(episode: Episode) -> list[float]:
    return [sum(token.reward for token in visit.tokens) for visit in episode.reached]


def turn_leave_one_out(episodes: Sequence[Episode], gamma=1.0, group_of_one="zero") -> Estimate:
    out: Estimate = []
    returns = [to_go(turn_rewards(episode), gamma) for episode in episodes]
    for i, episode in enumerate(episodes):
        out.append([])
        for visit, g in zip(episode.reached, returns[i], strict=True):
            others = [
                returns[j][place]
                for j, other in enumerate(episodes)
                if j != i and other.group == episode.group
                for place, theirs in enumerate(other.reached)
                if theirs.number == visit.number
            ]
            if not others:
                advantage = g if group_of_one == "raw" else 0.0
            else:
                advantage = 0.0 if are_equal([*others, g]) else g - mean(others)
            out[i] += [(advantage, g)] * len(visit.tokens)
    return out


def gigpo(
    episodes: Sequence[Episode],
    omega=1.0,
    gamma=0.95,
    divide_by_std=True,
    similarity=1.0,
    eps=1e-6,
    group_of_one="zero",
) -> Estimate:
    def compare(numbers: Sequence[float]) -> list[float]:
        return grpo_of(numbers, eps) if divide_by_std else dr_grpo_of(numbers)

    out = by_group(episodes, lambda group: compare(scores(group)), group_of_one)
    for index in members(episodes):
        met: list[tuple[int, int, str, float]] = []  # episode, turn, observation, discounted reward to go
        for i in index:
            for j, g in enumerate(to_go(turn_rewards(episodes[i]), gamma)):
                met.append((i, j, episodes[i].reached[j].observation, g))
        states: list[tuple[str, list[tuple[int, int, str, float]]]] = []
        for one in sorted(met, key=lambda x: x[2]):
            for name, inside in states:
                if SequenceMatcher(None, name, one[2], autojunk=False).ratio() >= similarity:
                    inside.append(one)
                    break
            else:
                states.append((one[2], [one]))
        extra = {}
        for _, inside in states:
            numbers = [x[3] for x in inside]
            for (i, j, *_), a in zip(inside, compare(numbers) if len(numbers) > 1 else [0.0], strict=True):
                extra[i, j] = omega * a
        for i in index:
            of_token = [j for j, visit in enumerate(episodes[i].reached) for _ in visit.tokens]
            out[i] = [(a + extra[i, j], g) for (a, g), j in zip(out[i], of_token, strict=True)]
    return out


def optimal_token_baseline(episodes: Sequence[Episode], zero_tail=True, leave_one_out=False) -> Estimate:
    out: Estimate = [[] for _ in episodes]
    for index in members(episodes):
        returns, realised = {}, {}
        for i in index:
            returns[i] = to_go([token.reward for token in episodes[i].tokens])
            total, sums = 0.0, []
            for token in episodes[i].tokens:
                energy = min(max(1 - 2 * math.exp(token.logp) + token.sum_pi_squared, 0.0), 2.0)
                total += token.weight**2 * energy
                sums.append(total)
            realised[i] = sums
        for i in index:
            for k, g in enumerate(returns[i]):
                there = [j for j in index if len(returns[j]) > k]
                used = [j for j in there if j != i or not leave_one_out]
                weight = sum(realised[j][k] for j in used)
                baseline = sum(realised[j][k] * returns[j][k] for j in used) / (weight + 1e-8)
                if len(index) == 1 or (zero_tail and len(there) == 1):
                    baseline = 0.0
                out[i].append((g - baseline, g))
    return out


def forked(episodes: Sequence[Episode], branches=4, every=1, gamma=0.99) -> Estimate:
    out: Estimate = []
    for episode in episodes:
        turns = episode.reached
        rewards = [sum(token.reward for token in turn.tokens) for turn in turns]
        values = [turn.forked for turn in turns] + [episode.end_value]
        known = [i for i, value in enumerate(values) if not math.isnan(value)]

        def gained(begin: int, rewards=rewards, values=values, known=known) -> float:
            until = min(i for i in known if i > begin)
            return sum(gamma ** (m - begin) * rewards[m] for m in range(begin, until)) + (
                gamma ** (until - begin) * values[until]
            )

        estimate = []
        for i, turn in enumerate(turns):
            before = [f for f in known if f <= i]
            advantage = gained(before[-1]) - values[before[-1]] if before else 0.0
            estimate += [(advantage, gained(i))] * len(turn.tokens)
        out.append(estimate)
    return out


DEFINITIONS: dict[type[AdvantageEstimator], Callable[..., Estimate]] = {
    GAE: gae,
    DualDiscountGAE: dual_discount,
    BiLevelGAE: bilevel,
    GRPO: grpo,
    DrGRPO: dr_grpo,
    RLOO: rloo,
    OPO: opo,
    GPG: gpg,
    PassAtK: pass_at_k,
    GDPO: gdpo,
    MaxRL: maxrl,
    ReinforcePlusPlus: reinforce_plus_plus,
    ReinforcePlusPlusBaseline: dr_grpo,
    ReMax: remax,
    Forked: forked,
    TurnLeaveOneOut: turn_leave_one_out,
    GiGPO: gigpo,
    OptimalTokenBaseline: optimal_token_baseline,
}

# Arguments other than the defaults, all of them in one variant or another
VARIANTS: dict[type[AdvantageEstimator], list[dict[str, Any]]] = {
    GAE: [{"gamma": 0.9, "lam": 0.8}],
    DualDiscountGAE: [{"gamma_step": 0.9, "lam_step": 0.8, "gamma_token": 0.97, "lam_token": 0.7}],
    BiLevelGAE: [{"gamma_turn": 0.9, "lam_turn": 0.8, "gamma_token": 0.97, "lam_token": 0.7}],
    GRPO: [{"eps": 0.1, "group_of_one": "raw"}],
    DrGRPO: [{"group_of_one": "raw"}],
    RLOO: [{"group_of_one": "raw"}],
    OPO: [{"group_of_one": "raw"}],
    GPG: [{"group_of_one": "raw"}],
    PassAtK: [{"divide_by_std": False, "group_of_one": "raw"}, {"eps": 0.1}],
    GDPO: [{"weights": {"format": 0.5, "reward": 2.0, "progression": -1.0}, "eps": 0.1, "group_of_one": "raw"}],
    MaxRL: [{"eps": 0.1, "group_of_one": "raw"}],
    ReinforcePlusPlus: [{"gamma": 0.9}],
    ReinforcePlusPlusBaseline: [{"group_of_one": "raw"}],
    ReMax: [],
    Forked: [{"branches": 2, "every": 3, "gamma": 0.8}],
    TurnLeaveOneOut: [{"gamma": 0.9, "group_of_one": "raw"}],
    GiGPO: [
        {"omega": 0.5, "gamma": 0.8, "similarity": 0.85, "group_of_one": "raw"},
        {"divide_by_std": False},
        {"eps": 0.1},
    ],
    OptimalTokenBaseline: [
        {"zero_tail": False},
        {"leave_one_out": True},
        {"leave_one_out": True, "zero_tail": False},
    ],
}
