"""Callbacks: warm-up, progress, logs and summaries."""

from lightning_agentrl.agents.engine_check import EngineCheck
from lightning_agentrl.callbacks.chain import Chain
from lightning_agentrl.callbacks.critic_warmup import CriticWarmup
from lightning_agentrl.callbacks.guards import (
    EntropyBounds,
    GradientSpikes,
    Guard,
    KLCeiling,
    RepetitionGuard,
    ValidActionFloor,
)
from lightning_agentrl.callbacks.policy_folder import PolicyFolder
from lightning_agentrl.callbacks.progress import StageProgress
from lightning_agentrl.callbacks.rollout_report import RolloutReport
from lightning_agentrl.callbacks.run_checkpoints import RunCheckpoints
from lightning_agentrl.callbacks.run_summary import RunSummary
from lightning_agentrl.callbacks.stop_on_signals import StopOnSignals
from lightning_agentrl.callbacks.thought_information import ThoughtInformation
from lightning_agentrl.callbacks.turn_log import TurnLog

__all__ = [
    "Chain",
    "CriticWarmup",
    "EngineCheck",
    "EntropyBounds",
    "GradientSpikes",
    "Guard",
    "KLCeiling",
    "PolicyFolder",
    "RepetitionGuard",
    "RolloutReport",
    "RunCheckpoints",
    "RunSummary",
    "StageProgress",
    "StopOnSignals",
    "ThoughtInformation",
    "TurnLog",
    "ValidActionFloor",
]
