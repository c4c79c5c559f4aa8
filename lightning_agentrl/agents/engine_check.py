"""The callback EngineCheck: stop a run whose engine does not sample from the policy that is trained."""

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
JUMP = 5.0  # times the median of the rollouts before, beyond which a mismatch causes a warning
REMEMBERED = 8  # rollouts
PART = 16  # rows of a rollout that are read again


class EngineCheck(RolloutCallback):
    """Compare the engine with the policy that is trained, and stop a run whose engine samples from something else.

    An agent adds this callback to a trainer that has none. Before the first rollout, the engine is sent weights that
    are moved far away and compared with the trainer on some hundred tokens. Later, the log-probs of each rollout are
    compared before it is trained on. With ``max_staleness`` the weights have changed by then, so a few tokens are
    sampled and compared after each update of the engine.

    Args:
        action: what to do if the engine samples from something else: ``stop`` the run, ``warn``, or ``off``: do not
            compare.
    """

    def __init__(self, action: Action = "stop") -> None:
        if action not in get_args(Action):
            raise ValueError(f"EngineCheck's action must be one of {', '.join(get_args(Action))}, got '{action}'")
        self.action = action
        self._comparison: EngineComparison | None = None  # once the first weights were sent
        self._before: deque[float] = deque(maxlen=REMEMBERED)  # mean mismatch of rollouts

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._comparison = None
        self._before.clear()

    def on_engine_sync(self, trainer: L.Trainer, agent: Any) -> None:
        """Compare many tokens at the first update, and with rollouts ahead a few at each later one."""
        if self.action == "off":
            return
        if self._comparison is not None:
            if agent.datamodule.max_staleness and not (seen := self._comparison.few()).logps_fit:
                self._act(seen)
            return
        comparison = self._comparison = comparison_of(agent)
        # An engine that samples with the policy itself has no weights to be moved.
        rounds = 2 if comparison.engine.holds_copy else 1
        found = [each.seen for each in comparison.rounds(rounds, agent.policy_version)]
        if wrong := [seen for seen in found if not seen.fits]:
            self._act(wrong[0])
        else:
            rank_zero_info(f"{type(comparison.engine).__name__} samples from the policy: {found[-1]}")

    def on_rollout(self, trainer: L.Trainer, agent: Any, rollout: Rollout) -> None:
        """Compare the log-probs of a rollout, before a step is taken."""
        if self._comparison is None:
            return
        data = agent.datamodule
        if data.max_staleness or (data.groups is not None and data.groups.ahead):
            # The log-probs of older weights differ from those of the policy, which has moved on.
            version = agent.policy_version
            current = [all(turn.policy_version == version for turn in sample.turns) for sample in rollout.samples]
            rollout = rollout.select(torch.tensor(current, dtype=torch.bool))
        if not sum(all_gather(len(rollout))):
            return
        mean = None if rollout.scores.old_logps is None else self._mean_mismatch(rollout.scores.old_logps, rollout)
        if mean is not None and mean <= self._comparison.bounds.mean:
            self._warn_of_jump(mean)
            return
        # The policy's own rounding may explain it, and no other part of the iteration may need the log-probs.
        part = rollout.select(list(range(min(len(rollout), PART))))
        seen = self._comparison.compare(action_rows(part), part.rollout_logps[part.action_mask].double())
        if (seen.mean if mean is None else mean) > seen.allowed.mean:
            self._act(seen)

    def _mean_mismatch(self, logps: Tensor, rollout: Rollout) -> float:
        """Return the mean mismatch of the trainer's log-probs [B, A] of a rollout, over all ranks."""
        mismatch = (logps - rollout.rollout_logps)[rollout.action_mask].abs().double()
        mismatch = mismatch[mismatch.isfinite()]  # a step on others is never taken
        totals, counts = zip(*all_gather((float(mismatch.sum()), len(mismatch))), strict=True)
        return sum(totals) / sum(counts) if sum(counts) else math.nan

    def _warn_of_jump(self, mean: float) -> None:
        """Warn if the mean mismatch is far above that of the rollouts before, though rounding could explain it."""
        assert self._comparison is not None
        usual = statistics.median(self._before or [mean])
        self._before.append(mean)
        if mean > max(JUMP * usual, self._comparison.bounds.mean / 10):
            rank_zero_warn(
                f"the mean log-prob mismatch between {type(self._comparison.engine).__name__} and trainer has jumped "
                f"to {mean:.2g}, from a median of {usual:.2g} in the rollouts before (mismatch/logp_gap_mean)"
            )

    def _act(self, seen: Comparison) -> None:
        """Stop or warn. Every rank must call it with the same comparison."""
        assert self._comparison is not None
        message = (
            f"{type(self._comparison.engine).__name__} does not sample from the policy that is trained: {seen}; "
            f"rounding explains {seen.allowed}. `agentrl verify-engine` with the same config names the likely cause; "
            "the callback EngineCheck with action: warn (key trainer.callbacks) goes on all the same"
        )
        if self.action == "stop":
            with raise_once():
                raise EngineMismatchError(message)
        rank_zero_warn(message)


def comparison_of(agent: Any) -> EngineComparison:
    """Return the comparison of a connected agent. It counts no progress, and may be left as a rollout is."""
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
