"""What is not the algorithm."""

from lightning_agentrl.callbacks.critic_warmup import CriticWarmup
from lightning_agentrl.callbacks.progress import StageProgress
from lightning_agentrl.callbacks.run_summary import RunSummary

__all__ = ["CriticWarmup", "RunSummary", "StageProgress"]
