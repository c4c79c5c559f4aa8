"""Agents: LightningModules that learn from rollouts."""

from lightning_agentrl.agents.agent import Agent
from lightning_agentrl.agents.clone import CloneAgent
from lightning_agentrl.agents.hooks import Attempt, RolloutCallback, StepGuard, Verdict
from lightning_agentrl.agents.models import Compute
from lightning_agentrl.agents.optim import Optim, Schedule, Schedules
from lightning_agentrl.agents.ppo import KL, PPOAgent
from lightning_agentrl.agents.scoring import Needs
from lightning_agentrl.agents.update import CurrentScores

__all__ = [
    "KL",
    "Agent",
    "Attempt",
    "CloneAgent",
    "Compute",
    "CurrentScores",
    "Needs",
    "Optim",
    "PPOAgent",
    "RolloutCallback",
    "Schedule",
    "Schedules",
    "StepGuard",
    "Verdict",
]
