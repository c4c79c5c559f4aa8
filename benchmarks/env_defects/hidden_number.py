"""Find a number between 1 and 8 by "too low" and "too high"."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium import spaces

from env_defects.catalogue import defect, sound

CHOICES = " ".join(f"[{number}]" for number in range(1, 9))


@sound
class HiddenNumber(gymnasium.Env[str, str]):
    """Replies are free text with a number in brackets; 1 for the number, truncated after four guesses."""

    observation_space = action_space = spaces.Text(100_000, min_length=0)
    free_text = True
    system_prompt = "Find the hidden number between 1 and 8. Reply with a number in brackets."
    max_turns = 4
    over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = self.draw(seed)
        self.turn = 0
        self.over = False
        return self.opening(), {}

    def draw(self, seed: int | None) -> int:
        return int(self.np_random.integers(1, 9))

    def opening(self) -> Any:
        return f"I think of a number. Reply with one of {CHOICES}."

    def read(self, reply: str) -> int | None:
        found = re.search(r"\[([0-9]{1,3})\]", reply)
        return None if found is None else int(found[1])

    def told(self, reply: str, guess: int | None) -> Any:
        if guess is None:
            answer = "That is no number in brackets."
        elif guess == self.number:
            answer = f"{guess} is right."
        else:
            answer = f"{guess} is too {'low' if guess < self.number else 'high'}."
        return f"{answer} Guesses left: {self.max_turns - self.turn}. Reply with one of {CHOICES}."

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.over:
            raise gymnasium.error.ResetNeeded("The episode is over: call reset().")
        guess = self.read(action)
        self.turn += 1
        found = guess == self.number
        truncated = not found and self.turn >= self.max_turns
        self.over = found or truncated
        return self.told(action, guess), float(found), found, truncated, {}

    def solver(self) -> Callable[[], str]:
        return lambda: f"[{self.number}]"


@defect(
    "echo",
    "warning",
    "the reply comes back in the next text as it is, with any markers of roles in it",
    r"echo|marker|special|template|control",
)
class Echo(HiddenNumber):
    def told(self, reply, guess):
        return f"You said: {reply}\n{super().told(reply, guess)}"


@defect(
    "half-emoji",
    "error",
    "an arrow that was cut in half leaves a lone surrogate after a guess that is too low",
    r"surrogate|utf|encod|unicode",
)
class HalfEmoji(HiddenNumber):
    def told(self, reply, guess):
        arrow = "\U0001f53c".encode("utf-16-le")[:2].decode("utf-16-le", "surrogatepass")
        return super().told(reply, guess).replace("low", f"low {arrow}")


@defect("colours", "warning", "the answer is coloured by escape codes of a terminal", r"control|escape|ansi|code")
class Colours(HiddenNumber):
    def told(self, reply, guess):
        return f"\x1b[1;31m{super().told(reply, guess)}\x1b[0m"


@defect(
    "old-transcript",
    "error",
    "the text begins with the guesses of the episode before",
    r"replay|dirty|used|instance|state|seed|determin|repeat|episode",
)
class OldTranscript(HiddenNumber):
    last = ""

    def opening(self):
        return self.last + super().opening()

    def told(self, reply, guess):
        told = super().told(reply, guess)
        self.last = f"{told}\n"
        return told


@defect(
    "pattern-hang",
    "error",
    "a pattern with nested repeats takes exponential time on a long reply without brackets",
    r"\bhang|time.?out|stuck|did not (answer|return)|takes longer|within \d",
)
class PatternHang(HiddenNumber):
    def read(self, reply):
        found = re.match(r"^(\w+\s?)*\[([0-9]{1,3})\]", reply.strip())
        return None if found is None else int(found[2])


@defect(
    "last-none",
    "error",
    "the observation of an episode's last turn is None",
    r"observation|text is|\bstr\b|None|types?\b",
)
class LastNone(HiddenNumber):
    def told(self, reply, guess):
        last = guess == self.number or self.turn >= self.max_turns
        return None if last else super().told(reply, guess)


@defect("markers", "warning", "the rules come with the markers of a chat template", r"marker|special|template|chat")
class Markers(HiddenNumber):
    def opening(self):
        return f"<|im_start|>user\n{super().opening()}<|im_end|>\n"


@defect(
    "global-random",
    "error",
    "the number moves within the episode by draws from the global generator, which reset seeds",
    r"global|random|rng|interleav|replay|instance",
)
class GlobalRandom(HiddenNumber):
    def draw(self, seed):
        random.seed(seed)
        return random.sample(range(1, 9), 3)[-1]

    def step(self, action):
        result = super().step(action)
        self.number = min(max(self.number + random.randint(-2, 2), 1), 8)
        return result
