"""A game in which every reply counts, so that untrained weights play all of it; `same_as.py` puts it on the path."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env[str, str]):
    """Find the hidden number: the sum of a reply's bytes, up to a multiple of five. Cut off after four turns."""

    free_text = True
    system_prompt = "Say anything."
    observation_space = action_space = spaces.Text(max_length=1000, min_length=0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.hidden, self.turns = int(self.np_random.integers(5)), 0
        return f"Which one of five is it? You have {4 + self.hidden} coins.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        heard = sum(action.encode()) % 5
        found = heard == self.hidden
        reward = 1.0 if found else -0.1 * abs(heard - self.hidden)
        return f"Turn {self.turns}: that was {heard}, try again.", reward, found, self.turns >= 4 and not found, {}


gymnasium.register(id="Echo-v0", entry_point=Echo)
