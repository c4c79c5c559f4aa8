"""One iteration with every estimator, correction, filter, loss and mean. A module of its own: processes import it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.laboratory.every_estimator import estimators
from lightning_agentrl.advantages import Forked
from lightning_agentrl.agents import KL, Needs, Optim, PPOAgent
from lightning_agentrl.agents.scoring import evaluation_mode
from lightning_agentrl.agents.selection import corrected, kept_rows, token_noise
from lightning_agentrl.distributed import over_ranks
from lightning_agentrl.losses import (
    AggregationMode,
    DropEqualScores,
    KeepCovering,
    KeepWidest,
    PPOClip,
    RatioRejection,
    TruncatedWeights,
)
from lightning_agentrl.metrics.rollout import kept_groups
from lightning_agentrl.models.critic import SharedCritic
from lightning_agentrl.rollout import GroupRollout, MiniBatch, Prepared, TurnInteraction
from lightning_agentrl.types import Rollout, Scores
from tests.agents.harness import ByLength, make_data, make_trainer
from tests.losses.test_conformance import CORRECTIONS, LOSSES, make, named

Place = tuple[int, int]  # environment over all ranks, turn

ESTIMATORS = estimators()
REJECTING = TruncatedWeights(normalise=True, rejections=[RatioRejection("mean", 0.92, 1.08)])
FILTERS = {"equal": DropEqualScores(), "widest": KeepWidest(0.5), "covering": KeepCovering(0.6)}
STEPS = {f"mean {mode}": (PPOClip(), mode) for mode in get_args(AggregationMode)} | {
    f"loss {cls.__name__}": (make(cls), cls.aggregation) for cls in LOSSES
}


@dataclass
class Report:
    """What a process found out."""

    tokens: dict[str, dict[Place, Tensor]] = field(default_factory=dict)  # [K, columns] of its own turns
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # of all processes, as they are logged
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def without_times(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in numbers.items() if not name.startswith("time/")}


class Everything(PPOAgent):
    """Prepares a rollout with every estimator, and takes every step with another loss, under weights that stay."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.report = Report()
        self.step = ""

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(sum_pi_squared=True, greedy_baseline=True, forks=Forked().needs_forks)

    def tell(self, name: str, rollout: Rollout, *columns_BA: Tensor) -> None:
        places = [(sample.turns[0].env, sample.turns[0].index) for sample in rollout.samples]
        table_BAN = torch.stack([x.double() for x in columns_BA], -1)
        rows = zip(places, table_BAN, rollout.action_mask, strict=True)
        self.report.tokens[name] = {place: row[mask] for place, row, mask in rows}

    def score(self, rollout: Rollout) -> Rollout:
        return rollout if rollout.scores.values is not None else super().score(rollout)

    def prepare(self, rollout: Rollout) -> Prepared:
        with evaluation_mode(self):
            rollout = self.score(rollout)
        misread = 0.4 * (token_noise(rollout, 0) - 0.5) * rollout.action_mask  # by the engine
        rollout = rollout.union(rollout_logps=rollout.rollout_logps + misread)
        for correction in CORRECTIONS:
            changed = corrected(rollout, correction, self.ranks.sum)
            weights = torch.ones_like(misread) if changed.weights is None else changed.weights
            self.tell(f"correction {named(correction)}", rollout, weights, changed.trained_mask)
        for name, group_filter in FILTERS.items():
            kept = rollout.select(kept_rows(rollout, group_filter, self.ranks.gather))
            self.tell(f"filter {name}", kept, kept.rewards)
            self.report.numbers[f"filter {name}"] = over_ranks(kept_groups(rollout, kept))
        for name, cls in ESTIMATORS.items():
            self.advantage = cls()
            for self.correction in (None, REJECTING):
                whole = super().prepare(rollout)
                prepared = whole.rollout
                assert prepared.advantages is not None
                assert prepared.returns is not None
                label = f"estimator {name}{'' if self.correction is None else ', rejecting'}"
                self.tell(label, prepared, prepared.advantages, prepared.returns)
                self.report.numbers[label] = without_times(whole.metrics)
        return Prepared(rollout.union(advantages=prepared.advantages, returns=prepared.returns), {})

    def training_step(self, batch: MiniBatch, batch_idx: int) -> None:
        """Advantages of both signs, an old policy that is another one, rejected tokens and weights."""
        self.step = list(STEPS)[batch_idx]
        self.loss, self.aggregation = STEPS[self.step]
        self.norm_tokens = 16 if self.aggregation == "seq-mean-token-sum-norm" else None
        rollout, mask = batch.rollout, batch.rollout.action_mask
        first, second, third = (token_noise(rollout, seed) for seed in (1, 2, 3))
        assert rollout.scores.old_logps is not None
        changed = rollout.union(
            advantages=(2 * first - 1) * mask,
            weights=(0.5 + second) * mask,
            loss_mask=mask & (second < 0.8),
            scores=Scores(old_logps=rollout.scores.old_logps + (third - 0.5) * mask),
        )
        super().training_step(MiniBatch(changed), batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.report.gradients[self.step] = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}

    def log_dict(self, numbers: Any, **how: Any) -> None:
        if "grad_norm/actor" in numbers:
            self.report.numbers[self.step] = without_times(numbers)
        super().log_dict(numbers, **how)


def fit(path: Path, model: str, devices: int) -> Report:
    """An iteration of four groups of three episodes, and as many steps as there are losses and means."""
    torch.manual_seed(0)
    agent = Everything(
        model,
        critic=SharedCritic(),
        kl=KL(reward=0.0),
        variance_proxy=True,
        optim=Optim(lr_actor=0.0, lr_critic=0.0, max_grad_norm_actor=1e9, max_grad_norm_critic=1e9),
    )
    agent.configure_model()
    agent.critic.head.linear.weight.data.normal_()
    data = make_data(
        groups=GroupRollout(size=3, per_rollout=4, mini_batches=1),
        update_epochs=len(STEPS),
        interaction=TurnInteraction(4, ByLength(), invalid_penalty=0.0),
    )
    make_trainer(path, 1, devices=devices, strategy="ddp" if devices > 1 else "auto").fit(agent, data)
    return agent.report


def run(rank: int, folder: str, model: str) -> None:
    """The work of one of two processes."""
    torch.set_num_threads(1)
    # they meet in a file, so no port can be taken
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}  # tells Lightning that the processes are there already
    torch.save(vars(fit(Path(folder), model, devices=2)), Path(folder, f"{rank}.pt"))
    dist.destroy_process_group()
