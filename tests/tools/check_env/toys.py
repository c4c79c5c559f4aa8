"""Sound games: some of gymnasium, told in words, and some whose episodes look like mistakes."""

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


class _Own(gymnasium.Env):
    def __init__(self) -> None:
        self.observation_space = self.action_space = spaces.Text(30_000, min_length=0, charset=PRINTABLE)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turn, self.number = 0, int(self.np_random.integers(9))
        return self.tell(), {}

    def tell(self) -> str:
        return f"Turn {self.turn}, number {self.number}."


class Quiz(_Own):
    """Five questions: every episode ends after five turns, most of them without a reward."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action.strip() == str(self.number**2 + 100)
        self.turn, self.number = self.turn + 1, int(self.np_random.integers(9))
        return self.tell(), float(right), self.turn == 5, False, {}


class Trap(_Own):
    """Every second field is a trap, so random walkers lose the same on every seed; who rests loses nothing."""

    actions = {"walk": "one field on", "run": "two fields on", "rest": "stay"}
    default_action = "rest"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn, self.number = self.turn + 1, int(self.np_random.integers(9))
        lost = action != "rest" and self.number % 2 == 0
        return self.tell(), -float(lost), lost, self.turn == 60, {"invalid_action": action not in self.actions}


class Board(_Own):
    """Guess the letters of a word below a large board; a second invalid reply in a row is the end, with a part paid."""

    free_text = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.found: set[str] = set()
        super().reset(seed=seed)
        self.word = {f"[{letter}]" for letter in self.np_random.permutation(list("abcdefghijklmnop"))[:2]}
        self.warned = False
        return self.tell(), {"success": False, "progression": 0.0}

    def tell(self) -> str:
        letters = " ".join(f"[{letter}]" for letter in "abcdefghijklmnop")
        return f"{letters}\n{'. ' * 600}\nFound: {sorted(self.found)}"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        valid = action in self.word - self.found
        self.found |= {action} & self.word
        over = len(self.found) == 2 or (self.warned and not valid)
        warns, self.warned = not valid and not over, not valid
        part = len(self.found) / 2
        info = {"success": part == 1, "progression": part, "invalid_action": not valid}
        return f"Wrong, once more.\n{self.tell()}" if warns else self.tell(), part * over, over, False, info


gymnasium.register("ToyBoard-v0", Board)
gymnasium.register("ToyQuiz-v0", Quiz)
gymnasium.register("ToyTrap-v0", Trap)
for _name in GAMES:
    gymnasium.register(f"Toy{_name}-v0", maker(_name))
