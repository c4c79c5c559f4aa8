"""A walk along a corridor: fetch the key, open the door."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from agentrl_envs import TextEnv
from env_defects.catalogue import defect, sound


@sound
class KeyDoor(TextEnv):
    """Four places in a row; 1 for the door opened with the key, which lies elsewhere."""

    actions = {"left": "one place left", "right": "one place right", "take": "take the key", "open": "open the door"}  # noqa: RUF012
    default_action = "left"
    max_turns = 40
    places = 4

    @property
    def system_prompt(self) -> str:
        return "You are in a corridor. Fetch the key and open the door. Reply with one word: left, right, take or open."

    def layout(self, seed: int | None) -> np.random.Generator:
        """Return what the places are drawn from."""
        return self.np_random

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.place, self.key, self.door = (int(at) for at in self.layout(seed).permutation(self.places)[:3])
        self.held = False

    def _act(self, action: str) -> tuple[float, bool]:
        if action == "take":
            self.held = self.held or self.place == self.key
        elif action == "open":
            opened = self.held and self.place == self.door
            return float(opened), opened
        else:
            self.place = min(max(self.place + (1 if action == "right" else -1), 0), self.places - 1)
        return 0.0, False

    def _observe(self) -> tuple[str, str]:
        key = "You hold the key." if self.held else f"The key lies {self.where(self.key)}."
        return f"You are at place {self.place + 1} of {self.places}. {key} The door is {self.where(self.door)}.", ""

    def where(self, thing: int) -> str:
        if thing == self.place:
            return "here"
        return "to the left" if thing < self.place else "to the right"

    def solver(self) -> Callable[[], str]:
        def player() -> str:
            goal = self.door if self.held else self.key
            if goal == self.place:
                return "open" if self.held else "take"
            return "left" if goal < self.place else "right"

        return player


@defect("unseeded", "error", "the layout is drawn from a generator without a seed", r"seed|replay|determin|repeat")
class Unseeded(KeyDoor):
    def layout(self, seed):
        return np.random.default_rng()


@defect(
    "first-seed",
    "error",
    "the first seed of an instance makes a generator that later resets go on with, so their seeds are ignored",
    r"seed|replay|determin|repeat|dirty|used|instance|twice",
)
class FirstSeed(KeyDoor):
    generator: np.random.Generator | None = None

    def layout(self, seed):
        if self.generator is None:
            self.generator = np.random.default_rng(seed)
        return self.generator


@defect(
    "kept-key",
    "error",
    "a key that is in the hand when an episode ends is still there in the next one",
    r"replay|dirty|used|instance|state|seed|determin|repeat",
)
class KeptKey(KeyDoor):
    def _start(self, seed, options):
        held = getattr(self, "held", False)
        super()._start(seed, options)
        self.held = held


@defect("limit-terminated", "warning", "the time limit is reported as terminated", r"limit|terminat|truncat")
class LimitTerminated(KeyDoor):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, False, info


@defect("both-flags", "error", "every end is reported as terminated and truncated", r"both|terminat|truncat")
class BothFlags(KeyDoor):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        over = terminated or truncated
        return observation, reward, over, over, info


@defect(
    "wall-clock",
    "error",
    "each reward is lowered by the seconds since the episode began",
    r"replay|determin|repeat|clock|differ|instance",
)
class WallClock(KeyDoor):
    def _start(self, seed, options):
        super()._start(seed, options)
        self.began = time.perf_counter()

    def _act(self, action):
        reward, over = super()._act(action)
        return reward - 0.01 * (time.perf_counter() - self.began), over


@defect(
    "braces",
    "error",
    "the reply is part of a format string, so braces in it raise",
    r"rais|crash|exception|hostile|\w+Error",
)
class Braces(KeyDoor):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info["log"] = (f"turn {{turn}}: {action[:200]}").format(turn=self.turn)
        return observation, reward, terminated, truncated, info


@defect(
    "shared-hand",
    "error",
    "the hand is a set of the class, so environments side by side share their keys",
    r"interleav|shared|instance|replay|determin|state|side",
)
class SharedHand(KeyDoor):
    hand: ClassVar[set[str]] = set()

    def _start(self, seed, options):
        super()._start(seed, options)
        self.hand.clear()

    def _act(self, action):
        self.held = "key" in self.hand
        reward, over = super()._act(action)
        if self.held:
            self.hand.add("key")
        return reward, over
