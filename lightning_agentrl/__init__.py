"""Multi-turn reinforcement learning of language agents on PyTorch Lightning.

What a script needs first is here: ``from lightning_agentrl import PPOAgent, RolloutDataModule, Trainer``. It is
imported when it is asked for, since torch takes seconds.
"""

from importlib import import_module, metadata
from typing import Any

__version__ = metadata.version("lightning-agentrl")
_PUBLIC = {
    "Policy": "agents.policy",
    "PPOAgent": "agents",
    "RolloutDataModule": "rollout",
    "Trainer": "callbacks.trainer",
    "evaluate": "tools.evaluate",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
