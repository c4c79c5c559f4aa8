"""Multi-turn reinforcement learning of language agents on PyTorch Lightning."""
