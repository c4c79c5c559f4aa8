"""Environments as a user might write them by mistake; `wrong_inputs.py` copies this file to `my_games.py`."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Base(gymnasium.Env):
    actions = {"left": "go left", "right": "go right"}  # noqa: RUF012
    default_action = "left"
    system_prompt = "Choose left or right."
    observation_space = action_space = spaces.Text(100)

    def __init__(self, size=3, colour="red"):
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "a fork in the road", {}

    def step(self, action):
        return "a fork in the road", 0.0, False, True, {}


class Actionless(Base):
    actions = {}  # noqa: RUF012


class BadReset(Base):
    def reset(self, *, seed=None, options=None):
        raise KeyError("level")


class BadStep(Base):
    def step(self, action):
        raise IndexError("no such room")


class Numbers(Base):
    def reset(self, *, seed=None, options=None):
        return 7, {}


class NoInfo(Base):
    def reset(self, *, seed=None, options=None):
        return "a fork in the road"


class LateNumbers(Base):
    def step(self, action):
        return 7, 0.0, False, True, {}


class FourValues(Base):
    def step(self, action):
        return "a fork in the road", 0.0, True, {}


class TextReward(Base):
    def step(self, action):
        return "a fork in the road", "much", False, True, {}


class Shows(Base):
    """A picture of any shape and type; `later`: from the second turn on."""

    def __init__(self, shape=(64, 64, 3), dtype="uint8", text="", count=1, later=False):
        self.shown = {"text": text, "images": [np.zeros(shape, dtype)] * count}
        self.later = later

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return ("a fork in the road" if self.later else self.shown), {}

    def step(self, action):
        return self.shown, 0.0, False, True, {}


class Speaks(Base):
    """In messages of its own."""

    def __init__(self, role="user", content="a fork"):
        self.said = {"messages": [{"role": role, "content": content}]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.said, {}

    def step(self, action):
        return self.said, 0.0, False, True, {}


for cls in (Base, Actionless, BadReset, BadStep, Numbers, NoInfo, LateNumbers, FourValues, TextReward, Shows, Speaks):
    gymnasium.register(id=f"{cls.__name__}-v0", entry_point=cls)
