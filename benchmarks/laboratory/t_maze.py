"""T-maze: a sign tells the side that pays, and the junction where it has to be known comes turns later.

An episode is a row of corridors. The first place of each has a sign, the places after it tell nothing but where one is,
and at its end one turns to the side of the sign, which leads into the next corridor, or to the other one, which ends
the episode. Before a junction there is nothing to choose, so what was done tells nothing of the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import gymnasium

from agentrl_envs import TextEnv

SIDES = ("left", "right")
FORWARD = "forward"  # all that can be done before a junction, and what a reply without an action does
ACTIONS = (*SIDES, FORWARD)


@dataclass(frozen=True)
class Corridors:
    """What is told and what is right in each turn of an episode in which all was right so far.

    Args:
        delay: turns between that of the sign and that of its junction.
        count: of corridors.
    """

    delay: int = 3
    count: int = 2

    @property
    def turns(self) -> int:
        return self.count * (self.delay + 2)

    @property
    def signs(self) -> list[tuple[str, ...]]:
        """The signs of all episodes there are; they are equally likely."""
        return list(product(SIDES, repeat=self.count))

    def words(self, turn: int, signs: Sequence[str]) -> str:
        """Return what is told in a turn."""
        corridor, place = divmod(turn, self.delay + 2)
        return " ".join([f"place{place}", *(signs[corridor : corridor + 1] if place == 0 else ())])

    def at_junction(self, turn: int) -> bool:
        return turn % (self.delay + 2) == self.delay + 1

    def right(self, turn: int, signs: Sequence[str]) -> str:
        """Return the only action after which the episode goes on, or ends well."""
        return signs[turn // (self.delay + 2)] if self.at_junction(turn) else FORWARD


class TMaze(TextEnv):
    """The game as an environment; each junction pays its share of 1, and passing all of them is success.

    Args:
        delay: see :class:`Corridors`.
        count: see :class:`Corridors`.
    """

    worker: Literal["inline"] = "inline"
    system_prompt = ""
    default_action = FORWARD

    def __init__(self, delay: int = 3, count: int = 2) -> None:
        super().__init__()
        self.corridors = Corridors(delay, count)
        self.max_turns = self.corridors.turns
        self.signs = self.corridors.signs[0]
        self._offer(0)

    def _offer(self, turn: int) -> None:
        self.actions = dict.fromkeys(ACTIONS if self.corridors.at_junction(turn) else (FORWARD,), "")

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.signs = self.corridors.signs[int(self.np_random.integers(len(self.corridors.signs)))]
        self._offer(0)

    def _act(self, action: str) -> tuple[float, bool]:
        passed = action == self.corridors.right(self.turn, self.signs)
        paid = passed and self.corridors.at_junction(self.turn)
        self._offer(self.turn + 1)
        return paid / self.corridors.count, not passed or self.turn + 1 == self.max_turns

    def _observe(self) -> tuple[str, str]:
        return self.corridors.words(self.turn, self.signs), ""

    def solver(self) -> Callable[[], str]:
        return lambda: self.corridors.right(self.turn, self.signs)


gymnasium.register("TMaze-v0", entry_point=f"{__name__}:TMaze")
