"""What the sweep checks: suite -> name -> id and arguments."""

from __future__ import annotations

from typing import Any

from reasoning_gym.factory import DATASETS

from agentrl_envs import ENV_IDS
from agentrl_envs.reasoning_gym.env import BROKEN, EVALUATED
from agentrl_envs.textarena.games import ONE_PLAYER, TWO_PLAYERS
from env_sweep.grid import MOVES
from env_sweep.small import GAMES

Case = tuple[str, dict[str, Any]]

_STRING_REWARDS = ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte")  # that TextArena's adapter refuses
_MIXED = ("composite",)  # of others, which have to be named
_GRIDS = (
    *("Empty-Random-6x6", "DoorKey-5x5", "FourRooms", "LavaGapS5", "SimpleCrossingS9N1", "Fetch-5x5-N2"),
    *("GoToDoor-5x5", "Unlock", "MemoryS7"),
)


def _discrete(game: str, describe: str, actions: tuple[str, ...], **others: Any) -> Case:
    given = {"game": game, "describe": f"env_sweep.grid:{describe}", "actions": list(actions)}
    return "agentrl_envs:Discrete-v0", given | others


def suites() -> dict[str, dict[str, Case]]:
    """Return every environment of the sweep."""
    arena, gym, raw = "agentrl_envs:TextArena-v0", "agentrl_envs:ReasoningGym-v0", "env_sweep:AsItComes-v0"
    torque = ("push left", "nothing", "push right")
    return {
        "untouched": {
            **{f"{name}-v0": (f"env_sweep:{name}-v0", {}) for name in GAMES},
            "Acrobot-v1": _discrete("Acrobot-v1", "numbers", torque, max_turns=200, solved_at=-199.0),
            **{
                f"MiniGrid-{name}-v0": _discrete(f"minigrid:MiniGrid-{name}-v0", "minigrid", MOVES, max_turns=60)
                for name in _GRIDS
            },
            "MiniGrid-Dynamic-Obstacles-5x5-v0": _discrete(
                "minigrid:MiniGrid-Dynamic-Obstacles-5x5-v0", "minigrid", MOVES[:3], max_turns=60
            ),
        },
        "ours": {name: (f"agentrl_envs:{name}", {}) for name in ENV_IDS},
        "TextArena for one": {name: (arena, {"game": name}) for name in ONE_PLAYER},
        "TextArena for two": {name: (arena, {"game": name}) for name in TWO_PLAYERS},
        "reasoning-gym": {name: (gym, {"dataset": name}) for name in sorted(set(DATASETS) - {*BROKEN, *_MIXED})},
        "as they come": {
            **{f"{name}-v0": (raw, {"game": f"{name}-v0"}) for name in sorted((*ONE_PLAYER, *_STRING_REWARDS))},
            **{name: ("env_sweep:Unguarded-v0", {"dataset": name}) for name in sorted((*BROKEN, *EVALUATED))},
        },
    }
