"""Guess a number in several turns; the answer to each wrong guess is "too low" or "too high"."""

from collections.abc import Callable
from typing import Any

from agentrl_envs.text_env import TextEnv

_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_MOST = 10_000  # a prompt lists every number as an action, so the range is limited


class GuessNumber(TextEnv):
    """Guess a number between 1 and `highest`; all earlier guesses and answers are in the observation.

    Args:
        highest: largest number that may be drawn, 2 to 10,000.
        max_turns: largest number of guesses; by default the number of guesses that bisection needs.
    """

    def __init__(self, highest: int = 5, max_turns: int | None = None) -> None:
        super().__init__()
        if not 2 <= highest <= _MOST:
            raise ValueError(f"highest must be 2 to {_MOST}, not {highest}.")
        self.highest = highest
        self.max_turns = highest.bit_length() if max_turns is None else max_turns
        self.actions = {str(number): f"guess {number}" for number in range(1, highest + 1)}
        self.aliases = {word: str(number) for number, word in enumerate(_WORDS[:highest], start=1)}
        self.aliases |= {description: name for name, description in self.actions.items()}
        self.default_action = "1"
        self._number = 1
        self._low, self._high = 1, highest  # range of the numbers that the answers do not exclude
        self._answers: list[str] = []

    @property
    def system_prompt(self) -> str:
        """Sentence that gives the range of the number."""
        return f"Guess the number between 1 and {self.highest}. Reply with the number only."

    def solver(self) -> Callable[[], str]:
        """Return a player that guesses by bisection."""
        return lambda: str((self._low + self._high) // 2)

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._number = int(self.np_random.integers(1, self.highest + 1))
        self._low, self._high = 1, self.highest
        self._answers = []

    def _act(self, action: str) -> tuple[float, bool]:
        guess = int(action)
        answer = "correct" if guess == self._number else "too low" if guess < self._number else "too high"
        if guess < self._number:
            self._low = max(self._low, guess + 1)
        elif guess > self._number:
            self._high = min(self._high, guess - 1)
        self._answers.append(f"{guess} is {answer}.")
        return float(guess == self._number), guess == self._number

    def _observe(self) -> tuple[str, str]:
        return "\n".join(self._answers) if self._answers else "No guess yet.", ""
