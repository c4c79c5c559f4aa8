"""A small sound game that gives odd values, or needs odd things of its process."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl_envs import TextEnv

LOCK = Path(tempfile.gettempdir(), f"agentrl-odd-{os.getuid()}.lock")


class _Unshown:
    def __repr__(self) -> str:
        raise ValueError("no words for it")


class _Sealed(str):
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("sealed")


class _Narrow(spaces.Space[Any]):
    def contains(self, x: Any) -> bool:
        return bool(x.shape == (3,))


class Odd(TextEnv):
    """Walk along five cells to the gold; with something odd about it, or with nothing.

    Args:
        what: is odd.
    """

    actions = {"west": "one cell west", "east": "one cell east"}
    default_action = "west"
    max_turns = 8

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what = what
        self.ended = threading.Event()
        if what == "thread":
            self.thread = threading.Thread(target=self.ended.wait, daemon=True)
            self.thread.start()
        if what in ("helper", "helper that stays"):
            helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000.0,), daemon=True)
            helper.start()
            self.helper = helper
        if what == "one at a time":
            self.lock = LOCK.open("w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if what == "narrow space":
            self.observation_space = _Narrow()
        if what == "bound to a thread":
            self.known = sqlite3.connect(":memory:")
        if what.startswith("signals"):
            self.worker = "process" if what.endswith("process") else None
        if what == "no list of modes":
            self.metadata = {"render_modes": None}
        if what == "takes for ever to make":
            time.sleep(1000.0)
        if what == "cannot be made":
            raise RuntimeError("no licence")
        if what == "large number":
            self.number = 10**6000

    @property
    def system_prompt(self) -> str:
        return "Walk to the gold."

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.cell, self.gold = int(self.np_random.integers(1, 4)), int(self.np_random.choice([0, 4]))

    def _act(self, action: str) -> tuple[float, bool]:
        self.cell = min(max(self.cell + (1 if action == "east" else -1), 0), 4)
        return float(self.cell == self.gold), self.cell == self.gold

    def _observe(self) -> tuple[str, str]:
        return f"You are in cell {self.cell}. The gold is in cell {self.gold}.", ""

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:
        if self.what == "no reset in a trainer" and "lightning" in sys.modules:
            raise RuntimeError("not here")
        observation, info = super().reset(**given)
        return observation, self._odd(info)

    def step(self, action: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if self.what.startswith("signals"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if self.what == "bound to a thread":
            self.known.execute("select 1")
        if self.what == "errors in other bytes":
            os.write(2, b"\xff not found\n" * 200)
        try:
            observation, reward, terminated, truncated, info = super().step(action)
        except gymnasium.error.ResetNeeded:
            if self.what == "exits after the end":
                sys.exit(3)
            if self.what == "hangs after the end":
                time.sleep(1000.0)
            raise
        pays = {"huge reward": 1e39, "endless number": 10**400}
        given: Any = reward
        if reward and self.what in pays:
            given = pays[self.what]
        ends: tuple[Any, Any] = terminated, truncated
        if self.what == "arrays":
            ends = np.array([terminated] * 2), np.array([truncated] * 2)
        return observation, given, *ends, self._odd(info)

    def _odd(self, info: dict[str, Any]) -> dict[str, Any]:
        if self.what == "sealed text" and self.cell == self.gold:
            return {**info, "long_term_text": _Sealed(info["long_term_text"])}
        odd = {"no words": {"odd": _Unshown()}, "large info": {"odd": 10**6000}, "numbered info": {0: self.cell}}
        return {**info, **odd.get(self.what, {})}

    def close(self) -> None:
        self.ended.set()
        if self.what == "thread":
            self.thread.join()
        if self.what == "helper":
            self.helper.terminate()
            self.helper.join()
        if self.what == "one at a time":
            self.lock.close()


gymnasium.register("Odd-v0", Odd)
gymnasium.register(
    "OddAndShort-v0", Odd, max_episode_steps=3
)  # a win in the third turn is a cut, too, says the wrapper
