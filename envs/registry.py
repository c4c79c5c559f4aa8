"""The registered environment ids, with the class and arguments of each."""

from typing import Any

import gymnasium

from agentrl_envs.baba.levels import LEVELS as BABA_LEVELS

_BABYAI = "agentrl_envs.babyai.env:BabyAIEnv"
# Minigrid has ids such as `BabyAI-GoTo-v0` for its own environments, so the text versions have the prefix `BabyAIText`.
_BABYAI_LEVELS = (
    "GoTo",
    "PickUp",
    "Open",
    "PutNext",
    "PickUpSeqGoTo",
    "GoToObjS4",
    "GoToObjS6",
    "GoToLocalS5N2",
    "GoToLocalS6N2",
    "GoToRedBallNoDists",
)

_BABA = "agentrl_envs.baba.env:BabaIsAIEnv"

# Lakes of 4 x 4 cells with 2 to 4 holes, and rooms with a box. `observation` may also be "text" or "both".
_SEEN: dict[str, Any] = {"observation": "image", "reward": "steps"}
_LAKES = {"size": 4, "holes": (2, 4), "placement": "random", "max_turns": 16, "min_way": 2}
_GRID_WORLDS: dict[str, tuple[str, dict[str, Any]]] = {
    "GridWorldImage-v0": ("agentrl_envs.frozen_lake.env:FrozenLake", {**_SEEN, **_LAKES}),
    "GridWorldImage-Boxes-v0": ("agentrl_envs.sokoban.env:Sokoban", _SEEN),
}

_ENVS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bandit-v0": ("agentrl_envs.games.bandit:Bandit", {}),
    "GuessNumber-v0": ("agentrl_envs.games.guess_number:GuessNumber", {}),
    "FrozenLakeText-v0": ("agentrl_envs.frozen_lake.env:FrozenLake", {}),
    "SokobanText-v0": ("agentrl_envs.sokoban.env:Sokoban", {}),
    **_GRID_WORLDS,
    "ZoomSearch-v0": ("agentrl_envs.zoom_search.env:ZoomSearch", {}),
    "DrawnGeometry-v0": ("agentrl_envs.geometry.drawn:DrawnGeometry", {}),
    "Search-v0": ("agentrl_envs.search.env:Search", {}),
    **{f"BabyAIText-{level}-v0": (_BABYAI, {"level": level}) for level in _BABYAI_LEVELS},
    "CrafterText-v0": ("agentrl_envs.crafter.env:CrafterText", {}),
    "BabaIsAI-v0": (_BABA, {}),
    **{f"BabaIsAI-{level}-v0": (_BABA, {"level": level}) for level in BABA_LEVELS},
}

# Environments whose actions are messages, and adapters that need a server, another package, or arguments.
_ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Discrete-v0": ("agentrl_envs.discrete.env:Discrete", {}),
    "Calculator-v0": ("agentrl_envs.tool_use.env:Calculator", {}),
    "ToolEnv-v0": ("agentrl_envs.tool_use.env:ToolEnv", {}),
    "OpenEnv-v0": ("agentrl_envs.openenv.client:OpenEnv", {}),
    "TextArena-v0": ("agentrl_envs.textarena.env:TextArena", {}),
    "ReasoningGym-v0": ("agentrl_envs.reasoning_gym.env:ReasoningGym", {}),
    "GeometryTasks-v0": ("agentrl_envs.geometry.dataset:GeometryTasks", {}),
    "TextWorld-v0": ("agentrl_envs.textworld.generated:TextWorld", {}),
    "TextWorldExpress-v0": ("agentrl_envs.textworld.express:TextWorldExpress", {}),
}

ENV_IDS: tuple[str, ...] = tuple(_ENVS)
"""Ids of all games of this package."""


def register_all() -> None:
    """Register every environment of this package, except ids that are already registered."""
    for env_id, (entry_point, kwargs) in (_ENVS | _ADAPTERS).items():
        if env_id not in gymnasium.registry:
            gymnasium.register(id=env_id, entry_point=entry_point, kwargs=kwargs)
