"""A quiz of one question: how many things are in a pack after something was given away?"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from env_defects.catalogue import defect, sound

THINGS = ("apples", "ropes", "lamps", "nails", "books")


@sound
class PackQuiz(gymnasium.Env[str, str]):
    """One turn; 1 for the right number. `info["answer"]` and `solver` name it, for checks."""

    observation_space = action_space = spaces.Text(100_000, min_length=0)
    free_text = True
    one_turn = True
    system_prompt = "Answer the question with a number in brackets."
    over = True

    def draws(self) -> np.random.Generator:
        return self.np_random

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        draws = self.draws()
        first, second = (THINGS[at] for at in draws.permutation(len(THINGS))[:2])
        many, few = int(draws.integers(3, 7)), int(draws.integers(2, 6))
        given = int(draws.integers(1, many))
        self.count = many - given + few
        self.over = False
        return self.question(many, first, few, second, given), {"answer": self.answer()}

    def question(self, many: int, first: str, few: int, second: str, given: int) -> str:
        return (
            f"Your pack holds {many} {first} and {few} {second}. You give away {given} of the {first}. "
            f"How many things are left in the pack? Reply with a number in brackets, such as [0]."
        )

    def answer(self) -> str:
        return f"[{self.count}]"

    def score(self, reply: str) -> Any:
        numbers = re.findall(r"\[([0-9]{1,3})\]", reply)
        return float(bool(numbers) and int(numbers[-1]) == self.count)

    def step(self, action: str) -> tuple[str, Any, bool, bool, dict[str, Any]]:
        if self.over:
            raise gymnasium.error.ResetNeeded("The question is answered: call reset().")
        self.over = True
        reward = self.score(action)
        return "Right." if reward else "Wrong.", reward, True, False, {}

    def solver(self) -> Callable[[], str]:
        return lambda: f"[{self.count}]"


@defect(
    "empty-paid", "error", "an empty reply counts as the beginning of the answer", r"gam|empty|hostile|paid|earn|pays"
)
class EmptyPaid(PackQuiz):
    def score(self, reply):
        return float(self.answer().startswith(reply.strip()))


@defect(
    "copy-paid",
    "error",
    "the answer may stand anywhere in the reply, so a copy of the question with its choices wins",
    r"gam|cop(y|ie)|prompt|observation|hostile|paid|earn|pays",
)
class CopyPaid(PackQuiz):
    def question(self, *args):
        return f"{super().question(*args)} Choices: {' '.join(f'[{number}]' for number in range(3, 11))}."

    def score(self, reply):
        return float(self.answer() in reply)


@defect(
    "leak",
    "warning",
    "a line left from debugging tells the answer in the question",
    r"leak|answer .*(prompt|text|observation)",
)
class Leak(PackQuiz):
    def question(self, *args):
        return f"{super().question(*args)}\n(expected: {self.answer()})"


@defect(
    "oracle-unpaid",
    "error",
    "the published answer is a word, but the scorer wants the number",
    r"answer|oracle|solver|published",
)
class OracleUnpaid(PackQuiz):
    def answer(self):
        return ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"][self.count]

    def solver(self):
        return self.answer


@defect("none-reward", "error", "a reply without a number gets None as its reward", r"reward")
class NoneReward(PackQuiz):
    def score(self, reply):
        if re.search(r"\[[0-9]", reply):
            return super().score(reply)
        return None


@defect("bool-reward", "error", "the reward is the truth value of the comparison", r"reward")
class BoolReward(PackQuiz):
    def score(self, reply):
        return super().score(reply) == 1.0


@defect(
    "int-crash",
    "error",
    "int() of all characters that isdigit() calls digits raises for superscripts and for thousands of digits",
    r"rais|crash|exception|hostile|\w+Error",
)
class IntCrash(PackQuiz):
    def score(self, reply):
        numerals = "".join(char for char in reply if char.isdigit())
        return float(bool(numerals) and int(numerals) == self.count)


@defect(
    "one-task",
    "notice",
    "every seed asks the same question",
    r"one (first )?(task|text)|same (first )?(task|text|observation)|seeds",
)
class OneTask(PackQuiz):
    def draws(self):
        return np.random.default_rng(0)
