"""Small environments that a process of their own can import."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import random
import subprocess
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
    "asks for too much memory": lambda: bytearray(2**62),
    "exits beside a child": leave_a_child,
    "exits": lambda: os._exit(3),
    "aborts": os.abort,
    "raises": lambda: [][1],
    "leaves": lambda: sys.exit(4),
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


class Blind(Walk):
    """The first one that is made cannot be drawn, and writes the file `once`."""

    def __init__(self, once: str) -> None:
        super().__init__()
        self.is_first = not Path(once).exists()
        Path(once).touch()

    def render(self) -> np.ndarray:
        if self.is_first:
            raise RuntimeError("no display")
        return super().render()


class Together(Walk):
    """Closes once so many of its kind are closing.

    Args:
        folder: where each leaves a file.
        count: of them.
    """

    def __init__(self, folder: str, count: int) -> None:
        super().__init__()
        self.folder, self.together = Path(folder), count

    def close(self) -> None:
        (self.folder / str(os.getpid())).touch()
        while len(list(self.folder.iterdir())) < self.together:
            threading.Event().wait(0.01)


class Changing(Walk):
    """Offers one more action after each step."""

    @property
    def actions(self) -> dict[str, str]:
        return {"left": "", **{f"jump {n}": "" for n in range(self.count)}}


class Telling(Walk):
    """Tells of the process it is in."""

    def text(self) -> str:
        facts = [str(os.getpid()), os.environ.get("PYTHONHASHSEED", ""), str(hash("door")), *sorted(sys.modules)]
        return " ".join(facts)


class Gambling(Walk):
    """Draws from the global generators, so it needs a process of its own."""

    worker = "process"

    def text(self) -> str:
        return f"{random.random()} {np.random.random()}"


class Parent(Walk):
    """Starts processes in a reset: one plainly, one in a session of its own, and one that is orphaned at once.

    Args:
        folder: where each of them, and the environment itself, leaves a file named after its id; only while it is empty
            are any started.
    """

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.folder = folder

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        if os.listdir(self.folder):
            return super().reset(seed=seed)
        run = ["sh", "-c", f"touch {self.folder}/$$; exec sleep 600"]
        subprocess.Popen(run)
        subprocess.Popen(run, start_new_session=True)
        if (child := os.fork()) == 0:
            subprocess.Popen(run, start_new_session=True)
            os._exit(0)
        os.waitpid(child, 0)
        Path(self.folder, str(os.getpid())).touch()
        while len(os.listdir(self.folder)) < 4:
            threading.Event().wait(0.01)
        return super().reset(seed=seed)


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


class Unrepeatable(Walk):
    """A server that drops its seed: every episode is another one."""

    deterministic = False
    episodes = itertools.count()

    def text(self) -> str:
        if not self.count:
            self.number = next(self.episodes)
        return super().text()


class Garbled(Walk):
    """Gives something else in a step or in a reset, or offers it.

    Args:
        garbage: what, one of GARBAGE.
        at: in which step of an episode, from 1; 0: in the reset.
        once: a file that is written when it happens; while it is there, it does not happen again.
    """

    def __init__(self, garbage: str, at: int = 2, once: str = "") -> None:
        super().__init__(50, at=at, once=once)
        self.garbage = garbage

    def reset(self, **settings: Any) -> Any:
        return self.garbled(list(super().reset(**settings)))

    def step(self, action: str) -> Any:
        return self.garbled(list(super().step(action)))

    def garbled(self, answer: list[Any]) -> Any:
        if self.count != self.at or (self.once and Path(self.once).exists()):
            self.__dict__.pop("offered", None)
            return tuple(answer)
        if self.once:
            Path(self.once).touch()
        place, value = GARBAGE[self.garbage]
        if isinstance(place, int):
            answer[place] = value
        elif place == "form":
            return value
        elif place.startswith("info "):
            answer[-1] = {place.removeprefix("info "): value}
        else:
            self.offered = {place: value}
        return tuple(answer)

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__").get("offered", {})
        return own[name] if name in own else super().__getattribute__(name)


GARBAGE: dict[str, tuple[Any, Any]] = {
    "no tuple": ("form", None),
    "other number of values": ("form", ("text",)),
    "observation": (0, 7),
    "reward": (1, "much"),
    "reward that is no number": (1, float("nan")),
    "endless reward": (1, float("-inf")),
    "terminated": (2, "no"),
    "truncated": (3, None),
    "info": (-1, ["nothing"]),
    "info text": ("info long_term_text", b"bytes"),
    "short text": ("info short_term_text", 3),
    "executed action": ("info executed_action", 4),
    "success": ("info success", "perhaps"),
    "invalid action": ("info invalid_action", [0, 1]),
    "metrics": ("info metrics", {"mood": "good"}),
    "our metrics": ("info metrics", {"lost/mine": 1.0}),
    "progression": ("info progression", "far"),
    "actions": ("actions", ["left"]),
    "no actions": ("actions", {}),
    "aliases": ("aliases", {"left": 1}),
    "default action": ("default_action", "jump"),
    "system prompt": ("system_prompt", None),
    "examples": ("examples", [("one",)]),
    "free text": ("free_text", "yes"),
    "one turn": ("one_turn", 7),
    "render mode": ("render_mode", 1.0),
    "worker": ("worker", "cellar"),
    "deterministic": ("deterministic", "mostly"),
}


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


SECRET = "sk-0123456789abcdef"


class Vault(gymnasium.Env[str, str]):
    """A user's environment behind a service with a key."""

    observation_space = action_space = gymnasium.spaces.Text(100)

    def __init__(self, api_key: str = "", nested: dict[str, list[str]] | None = None) -> None:
        if api_key != SECRET:
            raise PermissionError(f"401: {api_key!r} is not a valid key")
        self.nested = nested

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        raise ConnectionError(f"GET /reset?key={SECRET} timed out")


OF_A_WALK = (Walk, Unrepeatable, Garbled, Changing, Telling, Gambling, Quick, Late, Locked, Closing, Together, Stubborn)
for cls in (*OF_A_WALK, Vault, Blind, Parent):
    gymnasium.register(f"{cls.__name__}-v0", cls)
