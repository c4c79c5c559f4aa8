"""Metrics of one rollout's turns and episodes, as sums that can be added over ranks."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_agentrl.metrics.episodes import reported_numbers, succeeded
from lightning_agentrl.metrics.numbers import Max, Mean, Number, Sum, masked_mean
from lightning_agentrl.types import Rollout, StopReason, Turn
from lightning_agentrl.types.rounding import all_equal


def group_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return the spread of scores within groups and the age of turns; empty without groups."""
    if rollout.groups is None:
        return {}
    scores: dict[int, dict[int, float]] = {}  # of each episode of a group
    rounding: dict[int, float] = {}  # by which two of a group may differ
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
    """Return how many of the groups that were collected are trained on: neither lost nor left out by a filter."""
    assert collected.groups is not None
    assert trained.groups is not None
    return {"rollout/kept_groups": Mean(len(trained.groups.unique()), len(collected.groups.unique()))}


def staleness(
    turns: Sequence[Turn], policy_version: int, steps_per_iteration: int, held_steps: range = range(0)
) -> list[float]:
    """Return the staleness of each turn, in iterations in which the policy may have moved.

    Args:
        turns: turns with the versions of the weights that sampled them.
        policy_version: version of the weights that are trained next.
        steps_per_iteration: optimizer steps by which the version grows per iteration.
        held_steps: in which the version grows and the policy stays the same.
    """

    def moves(version: int) -> int:
        return version - min(max(version - held_steps.start, 0), len(held_steps))

    return [(moves(policy_version) - moves(turn.policy_version)) / steps_per_iteration for turn in turns]


def staleness_numbers(
    turns: Sequence[Turn], policy_version: int, steps_per_iteration: int, held_steps: range = range(0)
) -> dict[str, Number]:
    """Return the mean and the maximum; arguments as in :func:`staleness`."""
    ages = staleness(turns, policy_version, steps_per_iteration, held_steps)
    return {
        "mismatch/staleness_mean": Mean(sum(ages), len(ages)),
        "mismatch/staleness_max": Max(max(ages, default=0.0)),
    }


def token_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return means over action tokens, the KL also by part of the reply; what was not scored is left out."""
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
    """Return [B, A] bool: action tokens that are part of a thought, not of the part that names the action."""
    thought = torch.zeros_like(rollout.action_mask)
    for row, sample in enumerate(rollout.samples):
        for one in sample.placed_turns():
            first = one.columns.start
            thought[row, first : first + one.turn.thought_tokens] = True
    return thought


TOOLS = "tools/"  # names of numbers that count over all turns
LIMIT = 20.0  # of log-ratios and of their sums over a sample


def mismatch_numbers(rollout: Rollout) -> dict[str, Number]:
    """Compare the trainer's log-probs from before the update with the engine's; empty if they were not computed.

    ``mismatch/rejected`` and ``mismatch/weight`` show the effect of a correction.
    """
    mask = rollout.action_mask
    numbers: dict[str, Number] = {}
    if rollout.scores.old_logps is not None:
        train, engine = (_off(x, mask) for x in (rollout.scores.old_logps, rollout.rollout_logps))
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


def _off(x_BA: Tensor, mask_BA: Tensor) -> Tensor:
    """Return ``x`` in float64, 0 off the mask."""
    return torch.where(mask_BA, x_BA.double(), 0)


def rollout_numbers(rollout: Rollout) -> dict[str, Number]:
    """Return the metrics of turns, of ended episodes, of the environments, and of groups if there are any.

    Episodes are those that ended in this rollout, counted with all their turns, also those of earlier rollouts.
    """
    turns = rollout.turns
    prompts = sum(len(segment) for s in rollout.samples for segment in s.segments if not segment.is_action)
    return {
        **_per_turn(turns),
        "rollout/reply_tokens": Mean(float(rollout.action_mask.sum()), len(turns)),
        "rollout/prompt_tokens": Mean(prompts, len(turns)),
        **_images(rollout),
        **_forks(rollout),
        "rollout/history_cuts": Sum(sum(turn.history_cuts for turn in turns)),
        **_per_episode([turn for turn in turns if turn.done]),
        **_tools(turns),
        **_models(rollout),
        **_environments(turns),
        **group_numbers(rollout),
    }


def _images(rollout: Rollout) -> dict[str, Number]:
    """Return how many images a prompt shows, if there are any."""
    images = sum(len(sample.input.images) for sample in rollout.samples)
    return {"rollout/prompt_images": Mean(images, len(rollout.turns))} if images else {}


def _forks(rollout: Rollout) -> dict[str, Number]:
    """Return how many states were valued by playing on from them, and the turns that it took, if any were."""
    if rollout.state_values is None:
        return {}
    assert rollout.forked_end_values is not None
    states = int((~rollout.state_values.isnan() & rollout.action_mask).sum())
    lasts = [sample.turns[-1] for sample in rollout.samples]  # the state after one is valued where the rollout ends
    ends = zip(lasts, rollout.forked_end_values.tolist(), strict=True)
    states += sum(not (turn.done or turn.bootstrap is None or math.isnan(value)) for turn, value in ends)
    played = sum(turn.forked_turns for turn in rollout.turns)
    return {"rollout/forked_states": Sum(states), "rollout/forked_turns": Sum(played)}


def source_numbers(turns: Sequence[Turn], source: Callable[[Turn], str]) -> dict[str, Number]:
    """Return the main metrics of turns and ended episodes for each source by itself, by the name of a turn's source."""
    own: dict[str, list[Turn]] = {}
    for turn in turns:
        own.setdefault(source(turn), []).append(turn)
    return {
        key.replace("rollout/", f"rollout/source/{name}/"): number
        for name, part in own.items()
        for key, number in (_per_turn(part) | _per_episode([turn for turn in part if turn.done])).items()
        if key.startswith("rollout/")
    }


def _per_turn(turns: Sequence[Turn]) -> dict[str, Number]:
    count = len(turns)
    return {
        "rollout/reward_per_turn": Mean(sum(turn.reward for turn in turns), count),
        "rollout/valid_action_ratio": Mean(sum(turn.valid for turn in turns), count),
        "rollout/invented_action_ratio": Mean(sum(turn.invented for turn in turns), count),
        "rollout/token_cap_ratio": Mean(sum(turn.hit_token_cap for turn in turns), count),
    }


def _per_episode(lasts: Sequence[Turn]) -> dict[str, Number]:
    """Return metrics of the episodes with these last turns."""
    count = len(lasts)
    reasons = Counter(turn.stop for turn in lasts)
    each = [reported_numbers(turn) for turn in lasts]
    names = sorted({name for numbers in each for name in numbers if not name.startswith(TOOLS)})
    values_of = {name: [numbers[name] for numbers in each if name in numbers] for name in names}
    return {
        "rollout/episodes": Sum(count),
        "rollout/success": Mean(sum(succeeded(turn) for turn in lasts), count),
        "rollout/return": Mean(sum(turn.episode_return for turn in lasts), count),
        "rollout/episode_turns": Mean(sum(turn.index + 1 for turn in lasts), count),
        "rollout/truncated_ratio": Mean(sum(turn.truncated for turn in lasts), count),
        **{f"stop/{reason.value}": Mean(reasons[reason], count) for reason in StopReason},
        **{_named(name): Mean(sum(values), len(values)) for name, values in values_of.items()},
    }


def _named(name: str) -> str:
    """Return the name under which a number of an environment is logged; those of agents are our own."""
    return name if name.startswith("agent/") else f"env/{name}"


def _tools(turns: Sequence[Turn]) -> dict[str, Number]:
    """Return what all replies call together, if there are tools."""
    counts = Counter[str]()
    for turn in turns:
        counts.update({name: int(count) for name, count in turn.metrics.items() if name.startswith(TOOLS)})
    return {name: Sum(count) for name, count in counts.items()}


def _models(rollout: Rollout) -> dict[str, Number]:
    """Return reward, tokens and entropy of replies by the name of the model that an agent's calls ask for."""
    means: dict[str, list[float]] = {}  # sum and weight by name
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


def _environments(turns: Sequence[Turn]) -> dict[str, Number]:
    kinds = Counter(kind for turn in turns for kind in turn.env_errors)
    lost = Counter(kind for turn in turns for kind in turn.lost)
    env_seconds = sum(turn.env_seconds for turn in turns)
    return {
        "env/retries": Sum(kinds.total()),
        **{f"env/errors/{kind}": Sum(count) for kind, count in kinds.items()},
        **{f"env/lost/{kind}": Sum(count) for kind, count in lost.items()},
        "time/env_to_generation": Mean(env_seconds, sum(turn.engine_seconds for turn in turns)),
    }
