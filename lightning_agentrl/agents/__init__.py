"""LightningModules that learn from rollouts."""

from lightning_agentrl.agents.agent import Agent
from lightning_agentrl.agents.ppo import PPOAgent
from lightning_agentrl.agents.update import CurrentScores

__all__ = ["Agent", "CurrentScores", "PPOAgent"]
