"""A small sound game with an option for each of many defects, and another one of a single turn."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentrl_envs import PRINTABLE, TextEnv

MOVES = ("west", "east", "take")
SHARED = {"resets": 0, "where": 0}


class Mine(TextEnv):
    """Walk along nine cells to the gold and take it; with a defect, or with none.

    Args:
        defect: what is wrong with it.
        render_mode: as gymnasium has it.
    """

    metadata = {"render_modes": ["rgb_array"]}
    actions = {"west": "one cell west", "east": "one cell east", "take": "take the gold"}
    aliases = {"left": "west", "right": "east"}
    default_action = "take"
    max_turns = 12

    def __init__(self, defect: str = "", render_mode: str | None = None) -> None:
        super().__init__()
        self.defect = defect
        self.render_mode = render_mode
        self.games = 0
        self.history = ""
        if defect == "alias":
            self.aliases = {"left": "jump"}

    @property
    def system_prompt(self) -> str:
        answer = f" The gold is in cell {self.gold}." if self.defect == "prompt of the first episode" else ""
        return f"Find the gold in a corridor and take it. Actions: west, east, take.{answer}"

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        rng: Any = self.np_random
        if self.defect == "seed ignored":
            rng = np.random.default_rng()
        if self.defect == "global generator":
            random.seed(seed)
            rng = np.random.default_rng(random.randrange(10**6))
        self.games += 1
        self.place, self.last = int(rng.integers(9)), ""
        if self.defect == "seed 0 is none" and not seed:
            self.place = self.games % 9  # what no seed gives, but never twice the same by chance
        if self.defect != "prompt of the first episode" or self.games == 1:
            self.gold = int(rng.integers(9))
        self.hints = 0
        if self.defect == "state of earlier episodes":
            self.place = (self.place + max(self.games - 8, 0)) % 9
        if self.defect == "state on the module":
            SHARED["where"] = self.place
        if self.defect == "levels without gold" and self.gold > 3:
            self.gold = 20

    def _act(self, action: str) -> tuple[float, bool]:
        if self.defect == "state on the module":
            self.place = SHARED["where"]
        if self.defect == "random step" and np.random.default_rng().random() < 0.2:
            action = "west"
        if self.defect == "time" and time.perf_counter_ns() % 3 == 0:
            action = "west"
        if action != "take":
            self.place = min(max(self.place + (1 if action == "east" else -1), 0), 8)
        SHARED["where"] = self.place
        found = action == "take" and self.place == self.gold
        self.hints += 1
        return float(found), found

    def _observe(self) -> tuple[str, str]:
        side = "here" if self.place == self.gold else "west" if self.gold < self.place else "east"
        text = f"You are in cell {self.place}. The gold glitters {side}."
        if self.defect == "hash":
            text += " You see " + ", ".join({"a lamp", "a rope", "a pick", "a cart"}) + "."
        if self.defect == "markers":
            text += "<|im_end|>"
        if self.defect == "control":
            text += "\x1b[1m"
        if self.defect == "constant text":
            text = "You are in a corridor."
        if self.defect == "late text":
            text, self.last = self.last or text, text
        if self.defect == "plan" and self.turn == 0:
            move = "east" if self.gold > self.place else "west"
            text += " Way: " + " ".join([move] * abs(self.gold - self.place) + ["take"])
        return text, ""

    def solver(self):
        def player() -> str:
            return "take" if self.place == self.gold else "east" if self.gold > self.place else "west"

        return player

    def render(self):
        if self.defect == "drawing draws":
            self.place = int(self.np_random.integers(9))
        return np.zeros((8, 8, 3), np.float32 if self.defect == "picture" else np.uint8)

    def reset(self, **kwargs):
        text, info = super().reset(**kwargs)
        if self.defect == "slow reset":
            time.sleep(1.1)
        return (text, {**info, "success": True}) if self.defect == "success" else (text, info)

    def step(self, action):
        said = str(action)
        if self.defect == "raises":
            int(said) if said.isdigit() else 0
        if self.defect == "dies" and len(said) > 1000:
            import os

            os._exit(3)
        if self.defect == "hangs" and said == "null":
            time.sleep(3600)
        if self.defect == "eval" and said.startswith("__"):
            eval(said)
        if self.defect == "slow step" and self.turn == 3:
            time.sleep(0.25)
        if self.defect == "threads":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start() if self.turn == 0 else None
        if self.defect == "prints":
            print("step")
        text, reward, terminated, truncated, info = super().step(said)
        match self.defect:
            case "limit as end":
                terminated, truncated = terminated or truncated, False
            case "both ends":
                truncated = truncated or terminated
            case "win as cut":
                terminated, truncated = False, terminated or truncated
            case "no end":
                truncated, self._active = False, True
            case "ends as numbers":
                terminated = int(terminated)
            case "reward as text":
                reward = str(reward)
            case "reward missing":
                reward = None if info["invalid_action"] else reward
            case "reward not finite":
                reward = float("nan") if terminated else reward
            case "reward huge":
                reward *= 1e6
            case "reward turned":
                reward = -reward
            case "reward for words":
                reward += float(all(name in said for name in MOVES))
            case "reward for nothing":
                reward += 0.2 * (not said.strip())
            case "reward for take":
                reward += 0.2 * (said == "take")
            case "bytes":
                text = text.encode()
            case "surrogate":
                text += "\udcff" if self.turn > 2 else ""
            case "echo":
                text += f" You said: {said}" if info["invalid_action"] else ""
            case "grows":
                self.history += text * 5
                text = self.history
            case "empty":
                text = ""
            case "info text":
                info = str(info)
            case "progress":
                info["progression"] = 100.0 * terminated
            case "flag":
                info["invalid_action"] = False
            case "refused":
                info["invalid_action"] = said != "west"
            case "spaces":
                self.action_space = spaces.Text(self.turn + 5, charset=PRINTABLE)
            case "four values":
                return text, reward, terminated, info
        return text, reward, terminated, truncated, info


FOUND: dict[str, str] = {
    "seed ignored": "seed.honoured",
    "seed 0 is none": "seed.honoured",
    "global generator": "rng.global",
    "state of earlier episodes": "seed.honoured",
    "state on the module": "replay.interleaved",
    "prompt of the first episode": "replay.twice",
    "random step": "replay.twice",
    "time": "replay.twice",
    "drawing draws": "replay.render",
    "picture": "render.picture",
    "alias": "raises",
    "refused": "actions.refused",
    "flag": "actions.invalid_flag",
    "levels without gold": "solver.levels",
    "markers": "text.markers",
    "control": "text.control",
    "constant text": "text.constant",
    "late text": "text.stale",
    "plan": "leak.answer",
    "success": "info.success",
    "progress": "info.progression",
    "raises": "raises",
    "eval": "code",
    "threads": "left.threads",
    "limit as end": "ends.limit",
    "both ends": "ends.both",
    "win as cut": "ends.win",
    "no end": "ends.declared",
    "ends as numbers": "ends.type",
    "reward as text": "reward.type",
    "reward missing": "reward.type",
    "reward not finite": "reward.finite",
    "reward huge": "reward.size",
    "reward turned": "reward.success",
    "reward for words": "gaming.copy",
    "reward for nothing": "gaming.empty",
    "reward for take": "gaming.constant",
    "bytes": "text.type",
    "surrogate": "text.encoding",
    "echo": "text.echo",
    "grows": "text.grows",
    "empty": "text.empty",
    "info text": "contract.info",
    "spaces": "spaces.change",
    "four values": "contract.step",
}
"""Defect -> the check that finds it in the process of the exam."""
ELSEWHERE = {"hash": "replay.hash", "dies": "died", "hangs": "hang", "prints": "prints", "slow step": "time.step"}
"""The same for what needs other processes, or seconds."""


class Question(gymnasium.Env):
    """One turn: say the sum of two numbers. The answer is published; a reply is the action.

    Args:
        defect: what is wrong with it.
    """

    free_text = True
    one_turn = True

    def __init__(self, defect: str = "") -> None:
        self.defect = defect
        self.observation_space = self.action_space = spaces.Text(5000, min_length=0, charset=PRINTABLE)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.defect == "generator of random":
            random.random()
        if self.defect == "generator of numpy":
            np.random.rand()
        one, other = (int(number) for number in self.np_random.integers(10, 50, 2))
        self.total = one + other
        debug = f" [debug: total={self.total}]" if self.defect == "told" else ""
        return f"What is {one} + {other}? Reply with the number.{debug}", {"answer": str(self.total)}

    def step(self, action):
        right = action.strip() == str(self.total + (self.defect == "wrong answer"))
        paid = float(right)
        if self.defect in ("nan", "inf", "-inf"):
            paid = float(self.defect)
        if self.defect == "any text" and action.strip() and not right:
            paid = 0.2
        if self.defect == "inside":
            paid = float(str(self.total) in action or len(action) > 1000)
        return "", paid, True, False, {}


ASKED = {
    "told": "leak.answer",
    "wrong answer": "oracle.max",
    "any text": "gaming.hostile",
    "inside": "gaming.hostile",
}

AT_ONCE = {
    "generator of random": "rng.global",
    "generator of numpy": "rng.global",
    "nan": "reward.finite",
    "inf": "reward.finite",
    "-inf": "reward.finite",
}
"""The same for a question, where the first calls show it."""

gymnasium.register("Mine-v0", Mine)
gymnasium.register("Question-v0", Question)
