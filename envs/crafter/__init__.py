"""Crafter in words: a reproducible game (`game`), its texts (`text`), the environment (`env`) and a `player`."""

from agentrl_envs.crafter.text import describe

__all__ = ["describe"]
