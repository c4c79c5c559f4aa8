"""Multi-turn reinforcement learning of language agents on PyTorch Lightning.

The main classes can be imported from here: ``from lightning_agentrl import PPOAgent, RolloutDataModule, Trainer``.
These classes are loaded on first access, since importing torch takes seconds.
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
