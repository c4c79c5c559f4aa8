"""A game whose steps fail by a plan, in every way in which an environment can; `soak.py` plays it for hours."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium


def _raise(error: type[BaseException]) -> None:
    raise error("as planned")


RAISED = (OSError, SystemExit, KeyboardInterrupt, StopIteration, asyncio.CancelledError, MemoryError)
ANYWHERE: dict[str, Callable[[], None]] = {error.__name__: lambda error=error: _raise(error) for error in RAISED}
IN_A_PROCESS: dict[str, Callable[[], None]] = {
    "exits": lambda: os._exit(3),
    "aborts": os.abort,
    "hangs": lambda: threading.Event().wait() and None,
}
GARBLED = ("observation", "reward", "terminated", "info", "contract", "too long", "nan")


class Faulty(gymnasium.Env[str, str]):
    """Say something; the longer, the better. An episode has up to twelve steps.

    Args:
        folder: of marks for faults that have happened and do not come back.
        share: of faulty steps, resets among them. Half of the faults come back when the step is repeated.
        alone: the environment has a process of its own, so it may also take that down.
    """

    free_text = True
    observation_space = action_space = gymnasium.spaces.Text(max_length=1000, min_length=0)

    def __init__(self, folder: str, share: float = 0.05, alone: bool = False) -> None:
        self.folder, self.share = Path(folder), share
        self.faults = {**ANYWHERE, **(IN_A_PROCESS if alone else {})}
        self.system_prompt: Any = "Say something."
        self.begun, self.count, self.length = 0, 0, 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.begun, self.count, self.length = seed or 0, 0, 1 + int(self.np_random.integers(12))
        observation, *_, info = self._faulty([self._text(), 0.0, False, False, {}])
        return observation, info

    def step(self, action: str) -> tuple[Any, ...]:
        self.count += 1
        over = self.count == self.length
        return tuple(self._faulty([self._text(), len(action) / 10, over, False, {"success": len(action) > 8}]))

    def _text(self) -> str:
        return f"step {self.count} of game {self.begun % 97}"

    def _faulty(self, answer: list[Any]) -> list[Any]:
        self.system_prompt = "Say something."
        kind = self._planned()
        if kind in self.faults:
            self.faults[kind]()
        elif kind == "contract":
            self.system_prompt = 7
        elif kind == "nan":
            answer[1] = float("nan")
        elif kind == "too long":
            answer[0] += " wall" * 2000
        elif kind:
            answer[GARBLED.index(kind) if kind != "info" else -1] = b"garbage"
        return answer

    def _planned(self) -> str:
        """Return the fault of this step, empty if there is none; it follows from the seed and the step's number."""
        plan = random.Random(f"{self.begun} {self.count}")
        if plan.random() >= self.share:
            return ""
        kind, comes_back = plan.choice([*self.faults, *GARBLED]), plan.random() < 0.5
        mark = self.folder / f"{self.begun}-{self.count}"
        if not comes_back and mark.exists():
            return ""
        mark.touch()
        return kind


gymnasium.register("Faulty-v0", Faulty)
