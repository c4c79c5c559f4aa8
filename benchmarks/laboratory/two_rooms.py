"""Two rooms with a door between them: a small game of several turns in which every word is one token."""

from __future__ import annotations

from typing import Any

import gymnasium

from agentrl_envs import TextEnv

MOVES = {"west": (-1, 0), "east": (1, 0), "north": (0, -1), "south": (0, 1), "wait": (0, 0)}
ROOM, HEIGHT, DOOR = 2, 2, 0  # width of each room, height of both, and the row in which one can cross


class TwoRooms(TextEnv):
    """From a cell of the western room to a goal in the eastern one; reaching it pays 1, nothing else pays.

    Cells are told by words that are actions too: room, side of the room, row. So a random word is a move half of the
    time, and words that are none wait.
    """

    max_turns = 12
    system_prompt = ""
    default_action = "wait"
    actions = dict.fromkeys(MOVES, "")

    def __init__(self) -> None:
        super().__init__()
        self._place = self._goal = (0, 0)

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        start, self._place = self._drawn(), (0, 0)
        self._place, self._goal = start, (ROOM + self._drawn()[0], self._drawn()[1])

    def _drawn(self) -> tuple[int, int]:
        return int(self.np_random.integers(ROOM)), int(self.np_random.integers(HEIGHT))

    def _act(self, action: str) -> tuple[float, bool]:
        x, y = (a + b for a, b in zip(self._place, MOVES[action], strict=True))
        crosses = {self._place[0], x} == {ROOM - 1, ROOM}
        if 0 <= x < 2 * ROOM and 0 <= y < HEIGHT and (not crosses or y == DOOR):
            self._place = x, y
        return float(self._place == self._goal), self._place == self._goal

    def _observe(self) -> tuple[str, str]:
        return f"{_words(*self._place)} {_words(*self._goal)}", ""


def _words(x: int, y: int) -> str:
    sides = "west", "east"
    return f"{sides[x // ROOM]} {sides[x % ROOM]} {('north', 'south')[y]}"


gymnasium.register("TwoRooms-v0", entry_point=TwoRooms)
