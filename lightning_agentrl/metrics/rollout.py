"""Metrics of one rollout: its turns, episodes, tokens and texts, in a form that can be reduced over ranks."""

from __future__ import annotations

import math
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from operator import attrgetter

import torch
from torch import Tensor

from lightning_agentrl.distributed import Max, Mean, Number, Sum, all_gather
from lightning_agentrl.metrics.episodes import TOOLS
from lightning_agentrl.types import Rollout, StopReason, Turn
from lightning_agentrl.types.rounding import all_equal

LIMIT = 20.0  # bound of log-ratios and of their sums over a sample
AT_ONCE = 4096  # number of set members that are compared in one matrix product
_WORD = re.compile(r"\w+")


def masked_mean(x: Tensor, mask: Tensor) -> Mean:
    """Return the mean over a mask of the same shape, summed in float64; values off the mask are ignored."""
    return Mean(float(torch.where(mask, x, 0).double().sum()), int(mask.sum()))


def rollout_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return the metrics of turns, finished episodes, environments and groups, if any.

    Episodes are those that ended in this rollout, with all their turns, including turns in earlier rollouts.
    """
    turns, replies = rollout.turns, int(rollout.action_mask.sum())
    retries = Counter(chain.from_iterable(map(attrgetter("env_errors"), turns)))
    lost = Counter(chain.from_iterable(map(attrgetter("lost"), turns)))
    tools = Counter[str]()
    numbers = {
        **_turn_numbers(turns),
        **_model_numbers(rollout),
        "rollout/reply_tokens": Mean(replies, len(turns)),
        "rollout/prompt_tokens": Mean(rollout.tokens - replies, len(turns)),
        "rollout/history_cuts": Sum(sum(map(attrgetter("history_cuts"), turns))),
        "env/retries": Sum(retries.total()),
        "time/env_to_generation": Mean(
            sum(map(attrgetter("env_seconds"), turns)), sum(map(attrgetter("engine_seconds"), turns))
        ),
        **group_numbers(rollout),
    }
    for turn in turns:
        for name, number in turn.metrics.items():
            if name.startswith(TOOLS):  # sum over all replies
                tools[name] += int(number)
    for name, count in tools.items():
        numbers[name] = Sum(count)
    for kind, count in retries.items():
        numbers[f"env/errors/{kind}"] = Sum(count)
    for kind, count in lost.items():
        numbers[f"env/lost/{kind}"] = Sum(count)
    if images := sum(len(sample.input.images) for sample in rollout.samples):
        numbers["rollout/prompt_images"] = Mean(images, len(turns))
    return numbers if rollout.state_values is None else numbers | _fork_numbers(rollout)


def _turn_numbers(turns: Sequence[Turn]) -> dict[str, Number]:
    """Return the metrics of turns, and of the episodes that ended in one of them."""
    lasts = [turn for turn in turns if turn.done]
    stops = Counter(map(attrgetter("stop"), lasts))
    numbers: dict[str, Number] = {
        "rollout/reward_per_turn": _mean("reward", turns),
        "rollout/valid_action_ratio": _mean("valid", turns),
        "rollout/invented_action_ratio": _mean("invented", turns),
        "rollout/token_cap_ratio": _mean("hit_token_cap", turns),
        "rollout/episodes": Sum(len(lasts)),
        "rollout/success": _mean("succeeded", lasts),
        "rollout/return": _mean("episode_return", lasts),
        "rollout/episode_turns": Mean(sum(map(attrgetter("index"), lasts)) + len(lasts), len(lasts)),
        "rollout/truncated_ratio": _mean("truncated", lasts),
    }
    for reason in StopReason:
        numbers[f"stop/{reason.value}"] = Mean(stops[reason], len(lasts))
    reported: dict[str, list[float]] = {}
    for last in lasts:
        for name, number in last.finite_metrics.items():
            if not name.startswith(TOOLS):
                key = name if name.startswith("agent/") else f"env/{name}"  # agent metrics come from this package
                reported.setdefault(key, []).append(number)
    for name, values in reported.items():
        numbers[name] = Mean(sum(values), len(values))
    return numbers


def _mean(attribute: str, turns: Sequence[Turn]) -> Mean:
    return Mean(sum(map(attrgetter(attribute), turns)), len(turns))


def _model_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return reward, tokens and entropy of replies, by the name of the model that an agent program requests."""
    means: dict[str, list[float]] = {}  # name -> [sum, weight]
    entropy_BA = rollout.scores.entropy
    for row, sample in enumerate(rollout.samples):
        for one in sample.placed_turns():
            if not one.turn.model:
                continue
            tokens, name = len(one.action), re.sub(r"[^\w-]+", "_", one.turn.model)
            values = {"reward": (one.turn.reward, 1), "reply_tokens": (tokens, 1)}
            if entropy_BA is not None:
                values["entropy"] = (float(entropy_BA[row, one.columns].sum()), tokens)
            for what, (value, weight) in values.items():
                mean = means.setdefault(f"agent/model/{name}/{what}", [0.0, 0])
                mean[0] += value
                mean[1] += weight
    return {name: Mean(value, weight) for name, (value, weight) in means.items()}


def _fork_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return the number of states that were valued by branches, and the number of turns in branches."""
    assert rollout.state_values is not None
    assert rollout.forked_end_values is not None
    states = int((~rollout.state_values.isnan() & rollout.action_mask).sum())
    lasts = [sample.turns[-1] for sample in rollout.samples]  # the state after a cut sample is valued, too
    ends = zip(lasts, rollout.forked_end_values.tolist(), strict=True)
    states += sum(not (turn.done or turn.bootstrap is None or math.isnan(value)) for turn, value in ends)
    played = sum(turn.forked_turns for turn in rollout.turns)
    return {"rollout/forked_states": Sum(states), "rollout/forked_turns": Sum(played)}


def source_numbers(turns: Sequence[Turn], source: Callable[[Turn], str]) -> dict[str, Number]:
    """Return the ``rollout/`` metrics of turns and finished episodes separately for each source.

    Args:
        turns: turns of the rollout.
        source: function that returns the name of a turn's source.
    """
    own: dict[str, list[Turn]] = {}
    for turn in turns:
        own.setdefault(source(turn), []).append(turn)
    return {
        key.replace("rollout/", f"rollout/source/{name}/"): number
        for name, part in own.items()
        for key, number in _turn_numbers(part).items()
        if key.startswith("rollout/")
    }


def group_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return metrics of the spread of scores within groups and of the age of turns; empty without groups."""
    if rollout.groups is None:
        return {}
    scores: dict[int, dict[int, float]] = {}  # scores of episodes by group
    rounding: dict[int, float] = {}  # largest difference of equal scores by group
    columns = (rollout.groups, rollout.episode, rollout.outcomes, rollout.outcome_rounding)
    for group, episode, score, off in zip(*(x.tolist() for x in columns), strict=True):
        scores.setdefault(group, {})[episode] = score
        rounding[group] = max(rounding.get(group, 0.0), 2 * off)
    groups = [list(of_group.values()) for of_group in scores.values()]
    equal = sum(all_equal(list(of_group.values()), rounding[group]) for group, of_group in scores.items())
    versions = [turn.policy_version for turn in rollout.turns]
    newest = max(versions, default=0)
    return {
        "rollout/equal_groups": Mean(equal, len(groups)),
        "rollout/group_std": Mean(sum(statistics.stdev(g) for g in groups if len(g) > 1), len(groups)),
        "rollout/policy_lag": Mean(sum(newest - version for version in versions), len(versions)),
    }


def kept_groups(collected: Rollout, trained: Rollout) -> dict[str, Number]:
    """Return the fraction of collected groups that are trained on, since they are neither lost nor filtered out."""
    assert collected.groups is not None
    assert trained.groups is not None
    return {"rollout/kept_groups": Mean(len(trained.groups.unique()), len(collected.groups.unique()))}


def staleness(
    turns: Sequence[Turn], policy_version: int, steps_per_iteration: int, held_steps: range = range(0)
) -> list[float]:
    """Return the staleness of each turn, in iterations that changed the policy.

    Args:
        turns: turns with the versions of the weights that sampled them.
        policy_version: version of the weights that are trained next.
        steps_per_iteration: number of optimizer steps per iteration.
        held_steps: steps that increased the version without changing the policy.
    """

    def moves(version: int) -> int:
        return version - min(max(version - held_steps.start, 0), len(held_steps))

    return [(moves(policy_version) - moves(turn.policy_version)) / steps_per_iteration for turn in turns]


def staleness_numbers(
    turns: Sequence[Turn], policy_version: int, steps_per_iteration: int, held_steps: range = range(0)
) -> dict[str, Number]:
    """Return mean and maximum of the staleness of turns; arguments are as in :func:`staleness`."""
    ages = staleness(turns, policy_version, steps_per_iteration, held_steps)
    return {
        "mismatch/staleness_mean": Mean(sum(ages), len(ages)),
        "mismatch/staleness_max": Max(max(ages, default=0.0)),
    }


def token_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return entropy and KL averaged over action tokens, if they were scored; the KL also by part of the reply."""
    scores, mask = rollout.scores, rollout.action_mask
    numbers: dict[str, Number] = {}
    if scores.entropy is not None:
        numbers["rollout/entropy"] = masked_mean(scores.entropy, mask)
    if scores.old_logps is None:
        return numbers
    if scores.ref_logps is not None:
        log_ratio = scores.old_logps - scores.ref_logps
        thought = thought_mask(rollout)
        numbers["kl/reference"] = masked_mean(log_ratio, mask)
        numbers["kl/thought"] = masked_mean(log_ratio, mask & thought)
        numbers["kl/action"] = masked_mean(log_ratio, mask & ~thought)
    return numbers


def thought_mask(rollout: Rollout) -> Tensor:
    """Return a mask [B, A] of the action tokens in thoughts, as opposed to those that name the action."""
    thought = torch.zeros_like(rollout.action_mask)
    for row, sample in enumerate(rollout.samples):
        for one in sample.placed_turns():
            first = one.columns.start
            thought[row, first : first + one.turn.thought_tokens] = True
    return thought


def mismatch_numbers(rollout: Rollout) -> dict[str, Number]:
    """Compare the trainer's log-probs from before the update with the engine's; empty if they were not computed.

    ``mismatch/rejected`` and ``mismatch/weight`` show the effect of a correction.
    """
    mask = rollout.action_mask
    numbers: dict[str, Number] = {}
    if rollout.scores.old_logps is not None:
        train = torch.where(mask, rollout.scores.old_logps.double(), 0)
        engine = torch.where(mask, rollout.rollout_logps.double(), 0)
        gap = (train - engine).clamp(-LIMIT, LIMIT)
        filled = mask.any(1)
        count = mask.sum(1).clamp_min(1)
        row_sum = gap.sum(1).clamp(-LIMIT, LIMIT)
        numbers = {
            "mismatch/logp_gap_mean": masked_mean((train - engine).abs(), mask),
            "mismatch/kl": masked_mean(-gap, mask),
            "mismatch/k3": masked_mean(gap.expm1() - gap, mask),
            "mismatch/chi2_token": masked_mean((2 * gap).expm1(), mask),
            "mismatch/chi2_sample": masked_mean((2 * row_sum).expm1(), filled),
            "mismatch/perplexity_train": masked_mean((-train.sum(1) / count).exp(), filled),
            "mismatch/perplexity_engine": masked_mean((-engine.sum(1) / count).exp(), filled),
            "mismatch/perplexity_ratio": masked_mean((-gap.sum(1) / count).exp(), filled),
        }
        if mask.any():
            numbers["mismatch/logp_gap_max"] = Max(float((train - engine).abs().max()))
    if rollout.loss_mask is not None:
        numbers["mismatch/rejected"] = masked_mean(1.0 - rollout.loss_mask.double(), mask)
    if rollout.weights is not None:
        numbers["mismatch/weight"] = masked_mean(rollout.weights.double(), rollout.trained_mask)
    return numbers


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text without case and punctuation."""
    return tuple(_WORD.findall(text.casefold()))


def bigrams(text: str) -> list[str]:
    """Return pairs of neighboring words, without case and punctuation."""
    return list(map(" ".join, pairwise(words(text))))


def text_numbers(turns: Sequence[Turn]) -> dict[str, float]:
    """Return statistics of the texts of a rollout over all ranks; every rank must call this function.

    These statistics show early when thoughts collapse:

    * ``distinct_in_turn``: fraction of distinct word pairs in a reply; low if the reply repeats itself
    * ``distinct_across_turns``: fraction of distinct word pairs over all replies; low if all replies are similar
    * ``thought_copies``: fraction of thoughts that equal the thought of the previous turn of their episode
    * ``thought_diversity``: mean distance (1 - shared / all word pairs) between the last thoughts of two environments
    """
    counts = Counter(pairs=0, distinct=0, followed=0, copied=0)
    said: set[int] = set()  # hashes of the word pairs of all replies
    thoughts: dict[tuple[int, int, int], str] = {}
    for turn in turns:
        pairs = bigrams(turn.reply)
        counts.update(pairs=len(pairs), distinct=len({*pairs}))
        said.update(map(_hash, pairs))
        thoughts[turn.env, turn.episode, turn.index] = turn.thought
    last: dict[int, str] = {}  # last thought of each environment
    for (env, episode, index), thought in sorted(thoughts.items()):
        before = thoughts.get((env, episode, index - 1))
        if thought:
            last[env] = thought
            counts.update(followed=before is not None, copied=before == thought)
    members = [(env, _hash(pair)) for env, thought in last.items() for pair in {*bigrams(thought)}]

    every, shared, of_thoughts = zip(*all_gather((counts, said, members)), strict=True)
    counts = sum(every, Counter())
    numbers = {}
    if counts["pairs"]:
        numbers["text/distinct_in_turn"] = counts["distinct"] / counts["pairs"]
        numbers["text/distinct_across_turns"] = len(set().union(*shared)) / counts["pairs"]
    if counts["followed"]:
        numbers["text/thought_copies"] = counts["copied"] / counts["followed"]
    diversity = mean_distance(torch.tensor([*chain.from_iterable(of_thoughts)], dtype=torch.int64).reshape(-1, 2))
    if diversity is not None:
        numbers["text/thought_diversity"] = diversity
    return numbers


def mean_distance(members_Q2: Tensor) -> float | None:
    """Return the mean Jaccard distance over all pairs of sets, given as rows (set, member); None for fewer than 2."""
    sets, row = members_Q2[:, 0].unique(return_inverse=True)
    if len(sets) < 2:
        return None
    members, column = members_Q2[:, 1].unique(return_inverse=True)
    sizes, shared_EE = row.bincount().double(), torch.zeros(len(sets), len(sets), dtype=torch.float64)
    for first in range(0, len(members), AT_ONCE):  # a product of sparse tensors would be simpler, but causes a warning
        here = (column >= first) & (column < first + AT_ONCE)
        member_EW = torch.zeros(len(sets), min(AT_ONCE, len(members) - first), dtype=torch.float64)
        member_EW[row[here], column[here] - first] = 1
        shared_EE += member_EW @ member_EW.T
    distance_EE = 1 - shared_EE / (sizes[:, None] + sizes[None, :] - shared_EE)
    return float(distance_EE.sum() / (len(sets) * (len(sets) - 1)))  # distances on the diagonal are 0


def _hash(text: str) -> int:
    """Return a hash that is the same in every process, unlike Python's."""
    data = text.encode()
    return zlib.crc32(data) << 31 ^ zlib.adler32(data)
