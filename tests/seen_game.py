"""A small game that is seen: which way an arrow of squares points."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SIDE = 48


class Corner(gymnasium.Env):
    """One corner of the picture is bright; naming it pays. Every turn has a new picture, and some have two.

    Args:
        turns: of an episode.
        images: of each observation; 0: it tells the corner.
        side: of a picture in pixels.
    """

    actions = {"upper left": "", "upper right": "", "lower left": "", "lower right": ""}
    default_action = "upper left"
    system_prompt = "Which corner is bright?"

    def __init__(self, turns: int = 3, images: int = 1, side: int = SIDE) -> None:
        self.turns, self.images, self.side = turns, images, side
        self.observation_space = spaces.Dict(
            {"text": spaces.Text(100), "images": spaces.Sequence(spaces.Box(0, 255, (side, side, 3), np.uint8))}
        )
        self.action_space = spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._look(), {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = action == list(self.actions)[self.corner]
        self.count += 1
        over = self.count == self.turns
        return self._look(), float(right), over, False, {"success": right}

    def _look(self) -> Any:
        self.corner = int(self.np_random.integers(4))
        if not self.images:
            return f"turn {self.count}: {list(self.actions)[self.corner]}"
        half = self.side // 2
        picture = self.np_random.integers(0, 60, (self.side, self.side, 3), dtype=np.uint8)
        top, left = half * (self.corner // 2), half * (self.corner % 2)
        picture[top : top + half, left : left + half] += 180
        return {"text": f"turn {self.count}", "images": [picture] * self.images}


gymnasium.register("Corner-v0", entry_point=Corner)
