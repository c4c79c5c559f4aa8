"""LightningModules that learn from rollouts."""

from lightning_agentrl.agents.agent import Agent, CurrentScores
from lightning_agentrl.agents.ppo import PPOAgent

__all__ = ["Agent", "CurrentScores", "PPOAgent"]
