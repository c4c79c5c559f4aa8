"""A calculator with three keys: bring the display to a target that is two presses away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from env_defects.catalogue import defect, sound

KEYS: dict[str, Callable[[int], int]] = {
    "add three": lambda value: value + 3,
    "double": lambda value: value * 2,
    "take one": lambda value: value - 1,
}


@sound
class TwoSteps(gymnasium.Env[str, str]):
    """1 when the display shows the target; truncated after six presses. Another reply presses nothing."""

    observation_space = action_space = spaces.Text(100_000, min_length=0)
    actions: Any = {"add three": "add 3", "double": "multiply by 2", "take one": "subtract 1"}  # noqa: RUF012
    default_action = "take one"
    max_turns = 6
    over = True

    @property
    def system_prompt(self) -> str:
        return f"Bring the display to the target. Keys: {', '.join(self.names())}. Reply with the name of one key."

    def names(self) -> list[str]:
        return list(KEYS)

    def draw(self, high: int, seed: int | None) -> int:
        return int(self.np_random.integers(high))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        keys = list(KEYS)
        self.display = 4 + self.draw(9, seed)
        self.plan = [keys[self.draw(3, None)] for _ in range(2)]
        self.target = KEYS[self.plan[1]](KEYS[self.plan[0]](self.display))
        self.turn = 0
        self.over = False
        return self.text(), {}

    def text(self) -> str:
        return f"Display: {self.display}. Target: {self.target}. Presses left: {self.max_turns - self.turn}."

    def reward(self, solved: bool) -> float:
        return float(solved)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.over:
            raise gymnasium.error.ResetNeeded("The episode is over: call reset().")
        key = KEYS.get(action.strip().lower())
        if key is not None:
            self.display = key(self.display)
        self.turn += 1
        solved = self.display == self.target
        truncated = not solved and self.turn >= self.max_turns
        self.over = solved or truncated
        return self.text(), self.reward(solved), solved, truncated, {}

    def solver(self) -> Callable[[], str]:
        def player() -> str:
            """Name the first key of a shortest way to the target."""
            ways: list[tuple[int, tuple[str, ...]]] = [(self.display, ())]
            for value, way in ways:
                if value == self.target and way:
                    return way[0]
                if len(way) < self.max_turns:
                    ways += [(press(value), (*way, name)) for name, press in KEYS.items()]
            return self.default_action

        return player


@defect("bad-default", "error", "the default action is no action", r"default")
class BadDefault(TwoSteps):
    default_action = "wait"


@defect("list-actions", "error", "the actions are a list without descriptions", r"actions|contract|attribute|dict")
class ListActions(TwoSteps):
    actions = ["add three", "double", "take one"]  # noqa: RUF012


@defect(
    "hash-order",
    "error",
    "the keys are listed in the order of a set of strings, which changes with the process",
    r"hash|process|replay|determin|order|seed",
)
class HashOrder(TwoSteps):
    def text(self):
        return f"{super().text()} Keys: {', '.join({*KEYS, 'nothing else'})}."


@defect("global-numpy", "warning", "reset seeds and uses the global generator of numpy", r"global|random|numpy|rng")
class GlobalNumpy(TwoSteps):
    def draw(self, high, seed):
        if seed is not None:
            np.random.seed(seed % 2**32)
        return int(np.random.randint(high))


@defect(
    "after-end",
    "notice",
    "steps after the end are accepted, and paid again if the display still shows the target",
    r"after (the|its|an) (end|episode)|after.end|accept",
)
class AfterEnd(TwoSteps):
    def step(self, action):
        result = super().step(action)
        self.over = False
        return result


@defect("huge-reward", "warning", "the reward of a miss is minus the squared distance", r"reward|size|large|huge|big")
class HugeReward(TwoSteps):
    def reward(self, solved):
        return 1.0 if solved else -float((self.display - self.target) ** 2)


@defect(
    "never-ends",
    "error",
    "the end is looked for in a text, never found, and the limit is forgotten",
    r"\bends?\b|never|limit",
)
class NeverEnds(TwoSteps):
    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        self.over = str(self.target) == observation
        return observation, reward, self.over, False, info


@defect("slow", "warning", "each step waits 0.3 s", r"slow|latency|seconds|p99|step.*takes")
class Slow(TwoSteps):
    def step(self, action):
        time.sleep(0.3)
        return super().step(action)
