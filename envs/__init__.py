"""Text environments with one contract, :class:`TextEnv`; importing this package registers their ids with gymnasium.

``gymnasium.make("agentrl_envs:BabyAIText-GoTo-v0")`` works without another import. A game with dependencies is imported
only when ``gymnasium.make`` creates its environment.
"""

from agentrl_envs.registry import ENV_IDS, register_all
from agentrl_envs.text_env import PRINTABLE, Seen, TextEnv, TextInfo, normalise

__all__ = ["ENV_IDS", "PRINTABLE", "Seen", "TextEnv", "TextInfo", "normalise", "register_all"]

register_all()
