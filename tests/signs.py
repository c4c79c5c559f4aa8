"""A small game with a scripted player, which may be at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium


class Signs(gymnasium.Env):
    """Three signs after each other; each names the action that earns 1.

    Args:
        fault: what the scripted player does wrong.
    """

    actions = {"left": "", "right": ""}
    default_action = "left"
    system_prompt = "Do what the sign says."

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turn, self.right = 0, 0
        return self._sign(), {}

    def _sign(self) -> str:
        self.sign = "left" if self.np_random.random() < 0.5 else "right"
        return self.sign

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        reward = float(action == self.sign)
        self.right += int(reward)
        return self._sign(), reward, self.turn == 3, False, {"success": self.right == 3}

    def solver(self) -> Callable[[], Any] | None:
        def choose() -> Any:
            if self.fault == "raises" and self.turn == 1:
                raise RuntimeError("no way from here")
            return {"jumps": "jump", "number": 1}.get(self.fault, self.sign)

        return None if self.fault == "none" else choose


gymnasium.register("Signs-v0", Signs)
