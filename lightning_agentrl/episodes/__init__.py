"""One environment, its episodes, and the turn loop that plays them."""

from lightning_agentrl.episodes.interaction import Interaction, TurnInteraction
from lightning_agentrl.episodes.reward_model import RewardModel
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.episodes.sources import EnvConfig
from lightning_agentrl.episodes.tasks import ExactMatch, OneTurn, PatternMatch, Scorer, Task, TaskSet

__all__ = [
    "EnvConfig",
    "ExactMatch",
    "Interaction",
    "OneTurn",
    "PatternMatch",
    "RewardModel",
    "Scorer",
    "Session",
    "Task",
    "TaskSet",
    "TurnInteraction",
]
