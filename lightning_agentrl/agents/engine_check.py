"""The callback EngineCheck: stop a run whose engine does not sample from the current policy."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_agentrl.agents.engine_comparison import EngineComparison
from lightning_agentrl.agents.hooks import RolloutCallback
from lightning_agentrl.agents.scoring import action_rows, evaluation_mode
from lightning_agentrl.distributed import all_gather, raise_once, rank
from lightning_agentrl.episodes.seeds import derive_seed
from lightning_agentrl.errors import EngineMismatchError
from lightning_agentrl.metrics.mismatch import Comparison
from lightning_agentrl.types import Rollout

Action = Literal["stop", "warn", "off"]
JUMP = 5.0  # warn if the mismatch exceeds this many times the median of earlier rollouts
REMEMBERED = 8  # number of rollouts in the median
PART = 16  # number of rows of a rollout that are scored again


class EngineCheck(RolloutCallback):
    """Check that the engine samples from the current policy, and stop the run if it does not.

    An agent adds this callback to a trainer that lacks it. Before the first rollout, weights with large random changes
    are sent to the engine, and the log-probs of engine and trainer are compared on several hundred tokens. Later, the
    log-probs of each rollout are compared before training on it. With ``max_staleness`` the weights have changed by
    then, so a few tokens are sampled and compared after each weight transfer instead.

    Args:
        action: action if the log-probs differ by more than rounding: ``stop`` the run or ``warn``; ``off`` disables the
            check.
    """

    def __init__(self, action: Action = "stop") -> None:
        if action not in get_args(Action):
            raise ValueError(f"EngineCheck's action must be one of {', '.join(get_args(Action))}, got '{action}'")
        self.action = action
        self._comparison: EngineComparison | None = None  # set after the first weight transfer
        self._before: deque[float] = deque(maxlen=REMEMBERED)  # mean mismatches of recent rollouts

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._comparison = None
        self._before.clear()

    def on_engine_sync(self, trainer: L.Trainer, agent: Any) -> None:
        """Compare many tokens after the first weight transfer and, with ``max_staleness``, a few after later ones."""
        if self.action == "off":
            return
        if self._comparison is not None:
            if agent.datamodule.max_staleness and not (seen := self._comparison.few()).logps_fit:
                self._act(seen)
            return
        comparison = self._comparison = comparison_of(agent)
        # An engine that samples with the policy itself receives no weights, so changing them proves nothing.
        rounds = 2 if comparison.engine.holds_copy else 1
        found = [each.seen for each in comparison.rounds(rounds, agent.policy_version)]
        if wrong := [seen for seen in found if not seen.fits]:
            self._act(wrong[0])
        else:
            rank_zero_info(f"{type(comparison.engine).__name__} samples from the policy: {found[-1]}")

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        """Compare the log-probs of a rollout before the first step on it."""
        if self._comparison is None:
            return
        data = agent.datamodule
        if data.max_staleness or (data.groups is not None and data.groups.ahead):
            # Compare only turns that were sampled with the current weights.
            version = agent.policy_version
            current = [all(turn.policy_version == version for turn in sample.turns) for sample in rollout.samples]
            rollout = rollout.select(torch.tensor(current, dtype=torch.bool))
        if not sum(all_gather(len(rollout))):
            return
        mean = None if rollout.scores.old_logps is None else self._mean_mismatch(rollout.scores.old_logps, rollout)
        if mean is not None and mean <= self._comparison.bounds.mean:
            self._warn_of_jump(mean)
            return
        # Score some rows again: the mismatch is large, maybe due to the policy's own rounding, or the iteration did not
        # compute log-probs.
        part = rollout.select(list(range(min(len(rollout), PART))))
        seen = self._comparison.compare(action_rows(part), part.rollout_logps[part.action_mask].double())
        if (seen.mean if mean is None else mean) > seen.allowed.mean:
            self._act(seen)

    def _mean_mismatch(self, logps: Tensor, rollout: Rollout) -> float:
        """Return the mean absolute difference of the trainer's log-probs [B, A] to the engine's, over all ranks."""
        mismatch = (logps - rollout.rollout_logps)[rollout.action_mask].abs().double()
        mismatch = mismatch[mismatch.isfinite()]  # rows with non-finite log-probs are not trained on
        totals, counts = zip(*all_gather((float(mismatch.sum()), len(mismatch))), strict=True)
        return sum(totals) / sum(counts) if sum(counts) else math.nan

    def _warn_of_jump(self, mean: float) -> None:
        """Warn if the mean mismatch is far above that of recent rollouts, even if rounding could explain it."""
        assert self._comparison is not None
        usual = statistics.median(self._before or [mean])
        self._before.append(mean)
        if mean > max(JUMP * usual, self._comparison.bounds.mean / 10):
            rank_zero_warn(
                f"the mean log-prob mismatch between {type(self._comparison.engine).__name__} and trainer has jumped "
                f"to {mean:.2g}, from a median of {usual:.2g} in recent rollouts (mismatch/logp_gap_mean)"
            )

    def _act(self, seen: Comparison) -> None:
        """Stop or warn. Every rank must call this with the same comparison."""
        assert self._comparison is not None
        message = (
            f"{type(self._comparison.engine).__name__} does not sample from the policy that is trained: {seen}; "
            f"rounding explains {seen.allowed}. `agentrl verify-engine` with the same config names the likely cause; "
            "to continue anyway, add the callback EngineCheck with action: warn (key trainer.callbacks)"
        )
        if self.action == "stop":
            with raise_once():
                raise EngineMismatchError(message)
        rank_zero_warn(message)


def comparison_of(agent: Any) -> EngineComparison:
    """Return the comparison of the engine with the trained policy, for an agent that is attached to a data module.

    The comparison reports no progress, and a requested stop ends it.
    """
    data = agent.datamodule
    return EngineComparison(
        data.engine,
        data.collector.connection.handle,
        data.first_inputs,
        agent.tokenizer,
        replace(agent.reader, advance=lambda count: None),
        partial(evaluation_mode, agent),
        derive_seed(data.seed, rank()),
        data.stopping,
    )
