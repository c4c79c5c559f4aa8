"""Multi-turn reinforcement learning of language agents on PyTorch Lightning."""

from importlib import metadata

__version__ = metadata.version("lightning-agentrl")
