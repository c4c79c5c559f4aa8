"""Games in which every reply counts, so that untrained weights play all of them; `same_as.py` puts them on the path."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Echo(gymnasium.Env[Any, str]):
    """Find the hidden number: the sum of a reply's bytes, up to a multiple of five. Cut off after four turns."""

    free_text = True
    system_prompt = "Say anything."
    observation_space = action_space = spaces.Text(max_length=1000, min_length=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.hidden, self.turns = int(self.np_random.integers(5)), 0
        return f"Which one of five is it? You have {4 + self.hidden} coins.", {}

    def step(self, action: str) -> Step:
        self.turns += 1
        heard = sum(action.encode()) % 5
        found = heard == self.hidden
        reward = 1.0 if found else -0.1 * abs(heard - self.hidden)
        return f"Turn {self.turns}: that was {heard}, try again.", reward, found, self.turns >= 4 and not found, {}

    def solver(self) -> Callable[[], str]:
        """Return the scripted player: it tries one number after the other."""
        return lambda: "abcd"[self.turns]


class Failing(Echo):
    """Raise an error at the second turn: after some replies always, else in every second episode the first time only.

    The first kind loses the episode. The second kind is repaired by a retry.
    """

    repaired: ClassVar[set[int]] = set()  # seeds of episodes that have failed once

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        answer = super().reset(seed=seed)
        self.own_seed = seed or 0
        return answer

    def step(self, action: str) -> Step:
        if self.turns == 1:
            if sum(action.encode()) % 3 == 0:
                raise RuntimeError("this reply always fails")
            if self.own_seed % 2 and self.own_seed not in self.repaired:
                self.repaired.add(self.own_seed)
                raise RuntimeError("this episode fails once")
        return super().step(action)


class Ending(Echo):
    """Send SIGTERM to the trainer at a step, once in each folder.

    Args:
        at_step: number of the step among all steps in this process.
    """

    steps: ClassVar[int] = 0

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def step(self, action: str) -> Step:
        Ending.steps += 1
        marker = Path("signal_sent")
        if Ending.steps == self.at_step and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().step(action)


class Picture(Echo):
    """The hidden number is the brightness of a noisy picture, which is drawn anew in each turn."""

    observation_space = spaces.Dict(
        {"text": Echo.observation_space, "images": spaces.Sequence(spaces.Box(0, 255, (32, 32, 3), np.uint8))}
    )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen("How bright is it?"), {}

    def step(self, action: str) -> Step:
        text, *rest = super().step(action)
        return self._seen(text), *rest

    def _seen(self, text: str) -> dict[str, Any]:
        noise = self.np_random.integers(0, 50, (32, 32, 3), dtype=np.uint8)
        return {"text": text, "images": [noise + np.uint8(50 * self.hidden)]}


class Duel(gymnasium.Env[str, str]):
    """Two sides speak in turns, three times each; the larger sum of bytes, up to a multiple of seven, wins."""

    free_text = True
    system_prompt = "Say anything."
    observation_space = action_space = spaces.Text(max_length=1000, min_length=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.sums, self.played = [int(self.np_random.integers(7)), 3], [0, 0]
        return self._shown()

    def step(self, action: str) -> Step:
        side = sum(self.played) % 2
        self.sums[side] = (self.sums[side] + sum(action.encode())) % 7
        self.played[side] += 1
        over = sum(self.played) == 6
        text, info = self._shown()
        rewards = [float(self.sums[0] > self.sums[1]), float(self.sums[1] > self.sums[0])]
        return text, rewards[side] if over else 0.0, over, False, info | ({"side_rewards": rewards} if over else {})

    def _shown(self) -> tuple[str, dict[str, Any]]:
        side = sum(self.played) % 2
        return f"Side {side}, the sums are {self.sums}.", {"side": side, "side_turns": list(self.played)}


for game in (Echo, Failing, Ending, Picture, Duel):
    gymnasium.register(id=f"{game.__name__}-v0", entry_point=game)
