"""Rollouts: environments, prompts, interactions and the stream of mini-batches."""

from lightning_agentrl.rollout.chat import ChatRenderer, PromptFormat
from lightning_agentrl.rollout.data import RolloutDataModule
from lightning_agentrl.rollout.groups import GroupRollout
from lightning_agentrl.rollout.interaction import Interaction, TurnInteraction
from lightning_agentrl.rollout.memory import ActionsOnlyMemory, ClearingMemory, FullMemory, Memory, WindowMemory
from lightning_agentrl.rollout.parser import ActionParser, RawParser, TolerantParser
from lightning_agentrl.rollout.reward_model import RewardModel
from lightning_agentrl.rollout.session import EnvConfig, Session
from lightning_agentrl.rollout.stream import MiniBatch, OneStepOffPolicy, OnPolicy, RolloutSource, RolloutStream
from lightning_agentrl.rollout.tasks import ExactMatch, OneTurn, PatternMatch, Scorer, Task, TaskSet
from lightning_agentrl.rollout.validation import ValidationConfig

__all__ = [
    "ActionParser",
    "ActionsOnlyMemory",
    "ChatRenderer",
    "ClearingMemory",
    "EnvConfig",
    "ExactMatch",
    "FullMemory",
    "GroupRollout",
    "Interaction",
    "Memory",
    "MiniBatch",
    "OnPolicy",
    "OneStepOffPolicy",
    "OneTurn",
    "PatternMatch",
    "PromptFormat",
    "RawParser",
    "RewardModel",
    "RolloutDataModule",
    "RolloutSource",
    "RolloutStream",
    "Scorer",
    "Session",
    "Task",
    "TaskSet",
    "TolerantParser",
    "TurnInteraction",
    "ValidationConfig",
    "WindowMemory",
]
