"""Runs in which two ranks read together, and something is special; imported by these ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_agentrl.agents import PPOAgent
from lightning_agentrl.agents.update import CurrentScores
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.rollout.stopping import Stopped
from lightning_agentrl.types import Rollout
from tests.agents.harness import grouped, make_data, make_trainer


class ConstantOfNothing(PPOAgent):
    """Its losses of no rows have no graph."""

    empty = 0

    def policy_loss(self, batch: Rollout, scores: CurrentScores) -> Tensor:
        if not len(batch):
            self.empty += 1
            return torch.zeros(batch.action_mask.shape)
        return super().policy_loss(batch, scores)

    def value_loss(self, batch: Rollout, values: Tensor) -> Tensor:
        return super().value_loss(batch, values) if len(batch) else torch.zeros(batch.action_mask.shape)


class StopsWhileScoring(PPOAgent):
    """The second rank is asked to end as it begins to score, the first one learns of it afterwards."""

    def score(self, rollout: Rollout) -> Rollout:
        if self.global_rank == 1:
            self.datamodule.stopping.ask(signal.SIGTERM)
        return super().score(rollout)


def fit(kind: type[PPOAgent], path: Path, model: str, devices: int, parts: int) -> PPOAgent:
    """Two iterations with micro-batches of few tokens, so that some hold the rows of one rank alone."""
    torch.manual_seed(0)
    settings = {"lr_actor": 1e-3, "lr_critic": 1e-2, "max_tokens_per_micro_batch": 60, "sequence_parallel": parts}
    agent = kind(model, critic=SeparateCritic(), **grouped(settings))
    strategy = "ddp" if devices > 1 else "auto"
    make_trainer(path, 2, devices=devices, strategy=strategy).fit(agent, make_data())
    return agent


def run(rank: int, folder: str, model: str) -> None:
    """The work of one of two ranks."""
    torch.set_num_threads(1)
    path, report = Path(folder), dict[str, Any]()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}  # tells Lightning that the processes are there already
    agent = fit(ConstantOfNothing, path, model, 2, 2)
    report["empty"] = agent.empty
    torch.save(agent.state_dict(), path / f"{rank}.pt")
    try:
        fit(StopsWhileScoring, path, model, 2, 2)
    except Stopped as stopped:
        report["stopped"] = stopped.number
    (path / f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()
