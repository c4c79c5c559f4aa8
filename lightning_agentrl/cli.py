"""Run the commands of `agentrl` from Python."""

from lightning_agentrl.commands.fit import AgentCLI
from lightning_agentrl.commands.main import run

__all__ = ["AgentCLI", "run"]
