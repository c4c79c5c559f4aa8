"""Games of gymnasium, told in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl_envs import PRINTABLE

WAYS = ("left", "down", "right", "up")


class Told(gymnasium.Wrapper):
    """A game with a few actions, whose state is told by a function."""

    def __init__(self, env: gymnasium.Env, names: Sequence[str], tell: Callable[[Any], str]) -> None:
        super().__init__(env)
        self.actions = {name: f"action {name}" for name in names}
        self.default_action = names[0]
        self.tell = tell
        self.observation_space = self.action_space = spaces.Text(5000, min_length=0, charset=PRINTABLE)

    def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        state, _ = self.env.reset(**kwargs)
        return self.tell(state), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        names = list(self.actions)
        known = action in names
        state, reward, terminated, truncated, _ = self.env.step(names.index(action) if known else 0)
        return self.tell(state), float(reward), terminated, truncated, {"invalid_action": not known}


def place(columns: int) -> Callable[[int], str]:
    return lambda state: f"You are in row {state // columns}, column {state % columns}."


GAMES: dict[str, tuple[str, Sequence[str], Callable[[Any], str], dict[str, Any]]] = {
    "Lake": ("FrozenLake-v1", WAYS, place(4), {}),
    "FixedLake": ("FrozenLake-v1", WAYS, place(4), {"is_slippery": False}),
    "Cliff": ("CliffWalking-v1", ("up", "right", "down", "left"), place(12), {"max_episode_steps": 100}),
    "Blackjack": (
        "Blackjack-v1",
        ("stick", "hit"),
        lambda state: f"You {state[0]}, dealer {state[1]}, ace {state[2]}.",
        {},
    ),
    "Taxi": ("Taxi-v4", (*WAYS, "pick up", "drop off"), lambda state: f"State {state}.", {}),
    "CartPole": ("CartPole-v1", ("left", "right"), lambda state: " ".join(f"{one:.2f}" for one in state), {}),
    "Car": ("MountainCar-v0", ("left", "none", "right"), lambda state: f"At {state[0]:.2f}, {state[1]:.2f}.", {}),
}


def maker(name: str) -> Callable[..., gymnasium.Env]:
    def make(**settings: Any) -> gymnasium.Env:
        env_id, names, tell, options = GAMES[name]
        return Told(gymnasium.make(env_id, **options, **settings), names, tell)

    return make


for _name in GAMES:
    gymnasium.register(f"Toy{_name}-v0", maker(_name))
