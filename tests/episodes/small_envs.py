"""Small environments that a process of their own can import."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np


def leave_a_child() -> None:
    """End the process beside one that it has started and that holds all its files open."""
    if os.fork():
        os._exit(3)
    threading.Event().wait()


FAULTS = {
    "exits beside a child": leave_a_child,
    "exits": lambda: os._exit(3),
    "aborts": os.abort,
    "raises": lambda: [][1],
    "leaves": lambda: sys.exit(4),
    "is interrupted": lambda: raised(KeyboardInterrupt),
    "stops": lambda: raised(StopIteration),
    "cancels": lambda: raised(asyncio.CancelledError),
    "hangs": lambda: threading.Event().wait(),
    "hangs and holds the interpreter": lambda: ctypes.PyDLL(None).pause(),
}


def raised(error: type[BaseException]) -> None:
    raise error


class Walk(gymnasium.Env):
    """Counts steps, and has a fault in one of them, or where an action names it.

    Args:
        length: steps of an episode.
        fault: what happens, one of FAULTS.
        at: in which step of an episode, from 1; 0: in the reset.
        once: a file that is written when it happens; while it is there, it does not happen again.
        info: given in each step.
    """

    actions = {"left": "one step left", "right": "one step right"}
    default_action = "left"
    render_mode = "rgb_array"

    def __init__(self, length: int = 4, fault: str = "", at: int = 2, once: str = "", info: Any = None) -> None:
        self.length, self.fault, self.at, self.once, self.info = length, fault, at, once, info or {}
        self.count = 0

    @property
    def system_prompt(self) -> str:
        return f"Walk. Your number is {self.number}."

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.number = 0, int(self.np_random.integers(1000))
        self.fail()
        return self.text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action in FAULTS:
            FAULTS[action]()
        self.count += 1
        self.fail()
        return self.text(), float(self.count), self.count == self.length, False, dict(self.info)

    def fail(self) -> None:
        if self.fault and self.count == self.at and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            FAULTS[self.fault]()

    def text(self) -> str:
        return f"number {self.number}, step {self.count}"

    def render(self) -> np.ndarray:
        return np.full((2, 3, 3), self.count, dtype=np.uint8)


class Changing(Walk):
    """Offers one more action after each step."""

    @property
    def actions(self) -> dict[str, str]:
        return {"left": "", **{f"jump {n}": "" for n in range(self.count)}}


class Telling(Walk):
    """Tells of the process it is in."""

    def text(self) -> str:
        told = [str(os.getpid()), os.environ.get("PYTHONHASHSEED", ""), str(hash("door")), *sorted(sys.modules)]
        return " ".join(told)


class Gambling(Walk):
    """Draws from the global generators, so it needs a process of its own."""

    worker = "process"

    def text(self) -> str:
        return f"{random.random()} {np.random.random()}"


class Quick(Walk):
    """Runs in the thread that asks."""

    worker = "inline"

    def text(self) -> str:
        return f"in thread {threading.get_ident()}"


class Late(Walk):
    """Says that it needs a process only once it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.worker = "process"


class Locked(Walk):
    """Gives something that stays in its process."""

    def step(self, action: str) -> Any:
        *rest, _ = super().step(action)
        return *rest, {"lock": threading.Lock()}


class Closing(Walk):
    """Writes a file as it is closed."""

    def close(self) -> None:
        Path(self.once).touch()


class Stubborn(Walk):
    """Cannot be closed."""

    def close(self) -> None:
        raise OSError("was gone already")


for cls in (Walk, Changing, Telling, Gambling, Quick, Late, Locked, Closing, Stubborn):
    gymnasium.register(f"{cls.__name__}-v0", cls)
