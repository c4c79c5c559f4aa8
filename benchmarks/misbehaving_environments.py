"""Environments as a user might write them by mistake; `wrong_inputs.py` copies this file to `my_games.py`."""

import gymnasium
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


for cls in (Base, Actionless, BadReset, BadStep, Numbers, NoInfo, LateNumbers, FourValues, TextReward):
    gymnasium.register(id=f"{cls.__name__}-v0", entry_point=cls)
