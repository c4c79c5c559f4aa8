"""Rollouts: collection of episodes, and the stream of mini-batches."""

from lightning_agentrl.episodes.agent_program import AgentProgram
from lightning_agentrl.episodes.interaction import Interaction, TurnInteraction
from lightning_agentrl.episodes.judge import Judge, JudgedTurn, ModelJudge, PatternJudge
from lightning_agentrl.episodes.reward_model import RewardModel
from lightning_agentrl.episodes.session import Session
from lightning_agentrl.episodes.sides import SidesInteraction
from lightning_agentrl.episodes.sources import EnvConfig
from lightning_agentrl.episodes.summary import SummaryInteraction
from lightning_agentrl.episodes.tasks import ExactMatch, OneTurn, PatternMatch, Scorer, Task, TaskSet
from lightning_agentrl.episodes.wording import Wording
from lightning_agentrl.prompts.memory import (
    ActionsOnlyMemory,
    ClearingMemory,
    FullMemory,
    Memory,
    NotebookMemory,
    WindowMemory,
)
from lightning_agentrl.prompts.messages import PromptFormat
from lightning_agentrl.prompts.parser import ActionParser, RawParser, TolerantParser
from lightning_agentrl.prompts.renderer import ChatRenderer
from lightning_agentrl.rollout.collector import Prepared
from lightning_agentrl.rollout.data_module import RolloutDataModule
from lightning_agentrl.rollout.demonstrations import Demonstration, Demonstrations, Expert, Recorded
from lightning_agentrl.rollout.player import FaultLimits
from lightning_agentrl.rollout.sizes import GroupRollout
from lightning_agentrl.rollout.stream import MiniBatch, Phase, RolloutSource, RolloutStream
from lightning_agentrl.rollout.validation import ValidationConfig

__all__ = [
    "ActionParser",
    "ActionsOnlyMemory",
    "AgentProgram",
    "ChatRenderer",
    "ClearingMemory",
    "Demonstration",
    "Demonstrations",
    "EnvConfig",
    "ExactMatch",
    "Expert",
    "FaultLimits",
    "FullMemory",
    "GroupRollout",
    "Interaction",
    "Judge",
    "JudgedTurn",
    "Memory",
    "MiniBatch",
    "ModelJudge",
    "NotebookMemory",
    "OneTurn",
    "PatternJudge",
    "PatternMatch",
    "Phase",
    "Prepared",
    "PromptFormat",
    "RawParser",
    "Recorded",
    "RewardModel",
    "RolloutDataModule",
    "RolloutSource",
    "RolloutStream",
    "Scorer",
    "Session",
    "SidesInteraction",
    "SummaryInteraction",
    "Task",
    "TaskSet",
    "TolerantParser",
    "TurnInteraction",
    "ValidationConfig",
    "WindowMemory",
    "Wording",
]
