"""Agents of users whose numbers are not finite for one environment, in some steps."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_agentrl.agents import CurrentScores, PPOAgent
from lightning_agentrl.types import Rollout, Scores

Fault = Literal["loss", "constant", "gradient", "value loss", "values", "rewards"]


class FaultyAgent(PPOAgent):
    """An agent with a fault.

    Args:
        fault: ``loss``, times NaN; ``constant``, NaN without a gradient; ``gradient``, infinite under a finite loss;
            ``value loss``, infinite; ``values`` or ``rewards`` of a rollout, NaN.
        at: attempted steps, from 0, in which it shows; of a rollout, those before it.
        env: number of the environment.
        args: of PPOAgent.
        kwargs: of PPOAgent.
    """

    def __init__(self, *args: Any, fault: Fault = "loss", at: list[int] | None = None, env: int = 3, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.fault, self.at, self.env = fault, at or [], env
        self.trained: set[tuple[int, int]] = set()  # steps, and the environments whose turns were read in them

    def _rows(self, batch: Rollout) -> Tensor:
        """[B, 1] bool: where the fault is."""
        shows = self.policy_version in self.at
        rows = [shows and sample.turns[0].env == self.env for sample in batch.samples]
        return torch.tensor(rows, dtype=torch.bool, device=batch.action_mask.device)[:, None]

    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        self.trained |= {(self.policy_version, sample.turns[0].env) for sample in batch.samples}
        loss, rows = super().policy_loss(batch, scores), self._rows(batch)
        if not rows.any():
            return loss
        if self.fault == "loss":
            return loss * torch.where(rows, math.nan, 1.0)
        if self.fault == "constant":
            return torch.where(rows, math.nan, loss)
        if self.fault == "gradient":
            return loss + torch.where(rows, (scores.logps - scores.logps.detach()).sqrt(), 0.0)  # the root of 0
        return loss

    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        loss, rows = super().value_loss(batch, values), self._rows(batch)
        return loss * torch.where(rows, math.inf, 1.0) if self.fault == "value loss" and rows.any() else loss

    def score(self, rollout: Rollout) -> Rollout:
        rollout = super().score(rollout)
        if self.fault != "values":
            return rollout
        assert rollout.scores.values is not None
        return rollout.union(
            scores=Scores(values=rollout.scores.values * torch.where(self._rows(rollout), math.nan, 1))
        )

    def shape_rewards(self, rollout: Rollout) -> Tensor:
        rewards = super().shape_rewards(rollout)
        return rewards * torch.where(self._rows(rollout), math.nan, 1) if self.fault == "rewards" else rewards
