"""Metrics of one rollout's turns and episodes, as sums that can be added over ranks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from lightning_agentrl.metrics.episodes import reported_numbers, succeeded
from lightning_agentrl.metrics.groups import group_numbers
from lightning_agentrl.metrics.numbers import Mean, Number, Sum
from lightning_agentrl.types import Rollout, StopReason, Turn


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


def comes_with_episodes(name: str) -> bool:
    """Return whether a metric is a mean over the episodes that end in a rollout, of all or of one source."""
    return re.sub(r"^rollout/source/.+/", "rollout/", name) in PER_EPISODE


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
    names = sorted({name for numbers in each for name in numbers})
    values_of = {name: [numbers[name] for numbers in each if name in numbers] for name in names}
    return {
        "rollout/episodes": Sum(count),
        "rollout/success": Mean(sum(succeeded(turn) for turn in lasts), count),
        "rollout/return": Mean(sum(turn.episode_return for turn in lasts), count),
        "rollout/episode_turns": Mean(sum(turn.index + 1 for turn in lasts), count),
        "rollout/truncated_ratio": Mean(sum(turn.truncated for turn in lasts), count),
        **{f"stop/{reason.value}": Mean(reasons[reason], count) for reason in StopReason},
        **{f"env/{name}": Mean(sum(values), len(values)) for name, values in values_of.items()},
    }


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


# That have no value where no episode ends; besides, there is whatever environments report.
PER_EPISODE = tuple(name for name, x in _per_episode(()).items() if isinstance(x, Mean))
