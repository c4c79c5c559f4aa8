"""Environments, their episodes, and the turn loops that play them.

Names are imported on first access, since environment processes import modules of this package and must not load torch.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "EnvConfig": "sources",
    "ExactMatch": "tasks",
    "Interaction": "interaction",
    "Judge": "judge",
    "JudgedTurn": "judge",
    "ModelJudge": "judge",
    "OneTurn": "tasks",
    "PatternJudge": "judge",
    "PatternMatch": "tasks",
    "RewardModel": "reward_model",
    "Scorer": "tasks",
    "Session": "session",
    "SidesInteraction": "sides",
    "SummaryInteraction": "summary",
    "Task": "tasks",
    "TaskSet": "tasks",
    "TurnInteraction": "interaction",
    "Wording": "wording",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
