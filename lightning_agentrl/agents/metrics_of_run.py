"""Metrics of a prepared rollout and of a step over all ranks, as they are logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_agentrl.advantages import Reduce, token_energy, value_statistics, variance_proxies
from lightning_agentrl.agents.optim import stop_run
from lightning_agentrl.agents.selection import report_left_out, without_rows
from lightning_agentrl.distributed import all_gather, over_ranks
from lightning_agentrl.errors import ConfigError
from lightning_agentrl.losses import effective_share
from lightning_agentrl.metrics.rollout import (
    kept_groups,
    mismatch_numbers,
    rollout_numbers,
    source_numbers,
    staleness_numbers,
    text_numbers,
    token_numbers,
)
from lightning_agentrl.types import Rollout

WINDOW = "rollout/success_window"
# Start of an episode: index of the rollout, and turn of the environment in this rollout (always 0 with groups).
Began = tuple[int, int]


def describe_prepared(
    agent: Any, rollout: Rollout, faulty_B: Tensor, faults: Sequence[str], lost_B: Tensor, chosen: Rollout
) -> dict[str, float]:
    """Return the metrics of a prepared rollout, and warn of turns that are left out; every rank must call this.

    Args:
        agent: an ``Agent``.
        rollout: scored rollout with advantages and returns.
        faulty_B: mask of rows with non-finite numbers.
        faults: descriptions of the non-finite numbers: name and turns.
        lost_B: mask of rows that cannot be trained on, since an environment failed.
        chosen: the rows to train on.

    Raises:
        RunStoppedError: no turn of any rank has finite numbers.
        ConfigError: no agent program in the first rollout reported a reward.
    """
    # Without a correction only a rank that leaves rows out has a mask, and all ranks must log the same names.
    corrects = agent.correction is not None and agent.correction.needs_old_logps
    described = rollout if corrects else replace(rollout, loss_mask=None)
    # Without values, lost and rejected tokens have no returns.
    returned = None if agent.advantage.needs_values else without_rows(rollout, lost_B).trained_mask
    numbers = describe(described, agent.ranks.sum, faulty_B, returned)
    if numbers.get("agent/no_reward") == 1.0 and agent.policy_version == 0:
        raise ConfigError(
            "no episode of the first rollout has a reward: the agent must write it to the file AGENTRL_RESULT or post "
            "it, or the config must set a scorer (key data.init_args.env.init_args.scorer)"
        )
    if numbers.get("tools/parsed") == 0:
        rank_zero_warn(
            "the environment has tools, but no reply of an iteration contained a readable tool call (metrics "
            "tools/...); the policy may need examples of calls in its prompt, or behavior cloning first"
        )
    if agent.group_filter is not None and agent.phase == "train":
        numbers |= over_ranks(kept_groups(rollout, chosen))
    return numbers | report_left_out(rollout, faulty_B, faults, partial(stop_run, agent.trainer))


def describe(
    rollout: Rollout,
    reduce: Reduce,
    left_out_B: Tensor | None = None,
    returned_BA: Tensor | None = None,
) -> dict[str, float]:
    """Return the metrics of a rollout (see ``docs/metrics.md``); every rank must call this function.

    Args:
        rollout: scored rollout with advantages and returns. The rollout has a ``loss_mask`` on all ranks if a
            correction rejects tokens, else on no rank.
        reduce: function that sums a tensor over ranks.
        left_out_B: mask of rows with non-finite scores, which are ignored; their turns are still counted.
        returned_BA: mask of tokens that have returns; None: all action tokens.
    """
    kept_B = torch.ones(len(rollout), dtype=torch.bool) if left_out_B is None else ~left_out_B
    returned_BA = (rollout.action_mask if returned_BA is None else returned_BA) & kept_B[:, None]
    scored = rollout if kept_B.all() else rollout.select(kept_B)
    numbers = over_ranks({**rollout_numbers(rollout), **token_numbers(scored), **mismatch_numbers(scored)})
    numbers |= text_numbers(rollout.turns)
    if rollout.scores.values is not None and rollout.returns is not None:
        values = value_statistics(rollout.scores.values, rollout.returns, returned_BA, reduce)
        if not math.isnan(values.value_mean):  # the mean is NaN without tokens
            numbers |= {f"critic/{name}": value for name, value in asdict(values).items()}
    if scored.loss_mask is not None:
        kept = scored.loss_mask.double() if scored.weights is None else scored.weights * scored.loss_mask
        numbers["mismatch/ess"] = effective_share(kept, scored.action_mask, reduce)
    return numbers


def describe_collected(agent: Any, rollout: Rollout) -> dict[str, float]:
    """Return metrics of how a rollout was collected; every rank must call this function once per rollout."""
    numbers, data = agent.recent_episodes.update(rollout), agent.datamodule
    if data.max_staleness:
        held = agent.steps.held(agent.trainer)
        ages = staleness_numbers(rollout.turns, agent.policy_version, data.steps_per_iteration, held)
        numbers |= over_ranks(ages)
    if len(data.pool.names) > 1:
        numbers |= over_ranks(source_numbers(rollout.turns, data.pool.source_of))
    return numbers


def describe_step(
    agent: Any, rollout: Rollout, means: Mapping[str, float], norms: Mapping[str, float], taken: bool
) -> dict[str, float]:
    """Return the metrics of an optimizer step; every rank must call this function.

    Args:
        agent: an ``Agent``.
        rollout: this rank's part of the mini-batch.
        means: means of losses and other metrics over the mini-batch.
        norms: gradient norms before clipping, by parameter group.
        taken: whether the step was taken.
    """
    not_finite = agent.steps.not_finite > 0
    numbers = {**means, **{f"grad_norm/{name}": norm for name, norm in norms.items()}}
    if not_finite:  # do not log the non-finite numbers
        numbers = {name: x for name, x in numbers.items() if math.isfinite(x)}
    elif agent.variance_proxy and "actor" in norms:
        numbers |= describe_gradient(rollout, norms["actor"], agent.ranks.sum)
    return numbers | {"guard/not_finite": float(not_finite), "guard/skipped": float(not taken)}


def describe_gradient(rollout: Rollout, norm: float, reduce: Reduce) -> dict[str, float]:
    """Return signal and noise of the policy's gradient over a mini-batch as metrics; every rank must call this.

    Args:
        rollout: this rank's part of the mini-batch, with sums of squared probabilities and advantages.
        norm: gradient norm of the whole mini-batch before clipping.
        reduce: function that sums a tensor over ranks.
    """
    scores = rollout.scores
    assert scores.old_logps is not None
    assert scores.sum_pi_squared is not None
    assert rollout.advantages is not None
    energy = token_energy(scores.old_logps, scores.sum_pi_squared)
    if rollout.weights is not None:
        energy = energy * rollout.weights.square()
    proxies = variance_proxies(rollout.advantages, energy, rollout.trained_mask, norm, reduce)
    return {f"variance_proxy/{name}": x for name, x in asdict(proxies).items() if not math.isnan(x)}


class RecentEpisodes:
    """Success rate of recent episodes of all ranks, in the order in which they began.

    An episode is counted once all episodes that began before it or together with it have ended. Counting episodes as
    they end would be biased toward short ones. Among episodes that began together, episodes of environments with lower
    indices are dropped first.

    Args:
        size: number of recent episodes to average over.
        enough: smallest number of episodes for which the rate is logged.
    """

    def __init__(self, size: int = 100, enough: int = 20) -> None:
        self.size, self.enough = size, enough
        self.begin_anew()

    def begin_anew(self) -> None:
        """Drop the episodes of an earlier run, which may have used another environment."""
        self._rollouts = 0
        self._running: dict[int, Began] = {}  # running episodes by environment
        # Environment and episode come before the success, so that success does not affect the sort order.
        self._ended: list[tuple[Began, int, int, bool]] = []

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Add the turns of a rollout and return the success rate as a metric; every rank must call this method."""
        own = [(t.env, t.episode, t.index, t.group is not None, t.done, t.succeeded) for t in rollout.turns]
        turns = sorted(turn for part in all_gather(own) for turn in part)
        running = {}  # a new dictionary, so that episodes of failed environments are dropped
        for env, played in groupby(turns, itemgetter(0)):
            began = self._running.get(env, (self._rollouts, -1))
            ended = False
            for place, (_, episode, index, grouped, ended, success) in enumerate(played):
                if index == 0:
                    began = (self._rollouts, 0 if grouped else place)
                if ended:
                    self._ended.append((began, env, episode, success))
            if not ended:
                running[env] = began
        self._rollouts += 1
        self._running = running
        self._ended.sort()
        first = min(running.values(), default=(self._rollouts, 0))
        known = [success for began, _, _, success in self._ended if began < first]
        del self._ended[: max(len(known) - self.size, 0)]
        if len(known) < self.enough:
            return {}
        last = known[-self.size :]
        return {WINDOW: sum(last) / len(last)}

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts, "running": dict(self._running), "ended": list(self._ended)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rollouts, self._running, self._ended = state["rollouts"], dict(state["running"]), list(state["ended"])
