"""Run `agentrl fit` and `agentrl validate` from Python."""

from lightning_agentrl.commands.fit import AgentCLI, run

__all__ = ["AgentCLI", "run"]
