"""A contextual bandit of one turn: a word in the observation determines which of the named arms pays."""

from collections.abc import Callable
from typing import Any

from agentrl_envs.text_env import TextEnv

# pairs of a word in the observation and the arm that pays
_PAIRS = (("sun", "hat"), ("rain", "umbrella"), ("snow", "gloves"))


class Bandit(TextEnv):
    """One turn: the observation names the weather, the arm that fits the weather pays 1, every other arm pays 0.

    Args:
        arms: number of arms, 2 or 3.
    """

    max_turns = 1

    def __init__(self, arms: int = 3) -> None:
        super().__init__()
        if not 2 <= arms <= len(_PAIRS):
            raise ValueError(f"Bandit has 2 to {len(_PAIRS)} arms, not {arms}.")
        self._pairs = _PAIRS[:arms]
        self.actions = {arm: f"take the {arm}" for _, arm in self._pairs}
        self.aliases = {f"take the {arm}": arm for arm in self.actions} | {f"the {arm}": arm for arm in self.actions}
        self.default_action = next(iter(self.actions))
        self._word, self._good = self._pairs[0]

    @property
    def system_prompt(self) -> str:
        """Sentence that lists the arms."""
        return f"Choose what to take for the weather. Reply with one word: {', '.join(self.actions)}."

    def solver(self) -> Callable[[], str]:
        """Return a player that always takes the arm that pays."""
        return lambda: self._good

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._word, self._good = self._pairs[int(self.np_random.integers(len(self._pairs)))]

    def _act(self, action: str) -> tuple[float, bool]:
        return float(action == self._good), True

    def _observe(self) -> tuple[str, str]:
        return f"Weather: {self._word}", ""
