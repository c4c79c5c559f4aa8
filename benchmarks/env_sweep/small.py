"""Nine small sound games, written for the sweep after the rules of the checker were."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from agentrl_envs import PRINTABLE, TextEnv

Answer = tuple[str, float, bool, bool, dict[str, Any]]

GAMES: dict[str, int | None] = {
    "Hangman": None,
    "Nim": None,
    "BullsAndCows": 10,
    "Adventure": 25,
    "Sums": None,
    "Haggling": None,
    "EightPuzzle": None,
    "Pig": None,
    "Maze": None,
}
"""Name of the class -> turns after which gymnasium truncates; None where the game has an end of its own."""


class _Plain(gymnasium.Env[str, str]):
    """A game of texts that uses nothing but gymnasium."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self) -> None:
        self.observation_space = self.action_space = spaces.Text(30_000, min_length=0, charset=PRINTABLE)


class Hangman(_Plain):
    """Guess a word by its letters, with seven misses."""

    WORDS = ("garden", "winter", "bottle", "copper", "planet", "silver", "monkey", "ladder", "rocket", "jacket")
    system_prompt = "Guess a word of six letters. Reply with one letter."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._word = self.WORDS[int(self.np_random.integers(len(self.WORDS)))]
        self._tried: list[str] = []
        self._misses = 0
        return self._tell(), {}

    def step(self, action: str) -> Answer:
        letter = action.strip().lower()
        valid = len(letter) == 1 and "a" <= letter <= "z" and letter not in self._tried
        if valid:
            self._tried.append(letter)
        self._misses += not valid or letter not in self._word
        won, lost = all(one in self._tried for one in self._word), self._misses >= 7
        return self._tell(), float(won), won or lost, False, {"success": won, "invalid_action": not valid}

    def _tell(self) -> str:
        shown = " ".join(one if one in self._tried else "_" for one in self._word)
        return f"Word: {shown}. Tried: {' '.join(self._tried) or 'none'}. Misses: {self._misses} of 7."


class Nim(_Plain):
    """Two heaps, a rival that plays at random, and whoever takes the last one wins."""

    system_prompt = "Take as many as you like from one heap. Who takes the last one wins. Reply as in: take 2 from A"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._heaps = [int(one) for one in self.np_random.integers(2, 6, size=2)]
        return self._tell("You begin."), {"available_actions": self._moves()}

    def step(self, action: str) -> Answer:
        move = " ".join(action.split())
        if move not in self._moves():
            return self._tell("The rival wins, since this is no move."), -1.0, True, False, {"available_actions": []}
        self._take(move)
        if not any(self._heaps):
            return self._tell("You win."), 1.0, True, False, {"available_actions": []}
        reply = self._moves()[int(self.np_random.integers(len(self._moves())))]
        self._take(reply)
        if not any(self._heaps):
            return self._tell(f"The rival: {reply}. It wins."), -1.0, True, False, {"available_actions": []}
        return self._tell(f"The rival: {reply}."), 0.0, False, False, {"available_actions": self._moves()}

    def _moves(self) -> list[str]:
        return [f"take {n} from {'AB'[heap]}" for heap in range(2) for n in range(1, self._heaps[heap] + 1)]

    def _take(self, move: str) -> None:
        _, number, _, heap = move.split()
        self._heaps["AB".index(heap)] -= int(number)

    def _tell(self, said: str) -> str:
        return f"{said} A has {self._heaps[0]}, B has {self._heaps[1]}."


class BullsAndCows(_Plain):
    """Find three different figures in ten guesses."""

    system_prompt = "Find my number of three different figures from 1 to 6. Reply with a number such as 123."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = "".join(str(one + 1) for one in self.np_random.permutation(6)[:3])
        return "Guess.", {}

    def step(self, action: str) -> Answer:
        guess = action.strip()
        if len(guess) != 3 or len(set(guess)) != 3 or not set(guess) <= set("123456"):
            return "That is no such number.", 0.0, False, False, {"invalid_action": True}
        right = sum(mine == yours for mine, yours in zip(self._number, guess, strict=True))
        almost = len(set(guess) & set(self._number)) - right
        won = right == 3
        answer = f"{guess}: {right} at the right place, {almost} elsewhere."
        return answer, float(won), won, False, {"invalid_action": False, "success": won}


class Adventure(_Plain):
    """Five rooms in a row, a lamp in one of them, and a cellar that wants it."""

    ROOMS = ("hall", "kitchen", "library", "attic", "tower")
    system_prompt = "Find the lamp and light the cellar below the hall. Commands: go east, go west, go down, take lamp."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._lamp = int(self.np_random.integers(1, 5))
        self._here, self._holds = int(self.np_random.integers(0, 5)), False
        return self._tell("You wake up."), {"admissible_commands": self._commands()}

    def step(self, action: str) -> Answer:
        command, reward, over = action.strip().lower(), 0.0, False
        said = "Nothing happens."
        if command in self._commands():
            if command == "take lamp":
                self._holds, reward, said = True, 0.5, "You take the lamp."
            elif command == "go down":
                over, reward = True, 0.5 if self._holds else 0.0
                said = "You light the cellar." if self._holds else "It is dark; you fall and break a leg."
            else:
                self._here += 1 if command == "go east" else -1
                said = "You walk."
        info = {"admissible_commands": [] if over else self._commands(), "success": over and self._holds}
        return self._tell(said), reward, over, False, info

    def _commands(self) -> list[str]:
        ways = [("go east", self._here < 4), ("go west", self._here > 0), ("go down", self._here == 0)]
        lamp = ("take lamp", self._here == self._lamp and not self._holds)
        return [command for command, possible in (*ways, lamp) if possible]

    def _tell(self, said: str) -> str:
        lamp = " A lamp lies here." if self._here == self._lamp and not self._holds else ""
        held = " You hold a lamp." if self._holds else ""
        return f"{said} You are in the {self.ROOMS[self._here]}.{lamp}{held} You can: {', '.join(self._commands())}."


class Sums(_Plain):
    """Five sums in a row, a fifth of the reward for each."""

    system_prompt = "Five sums follow, one in each turn. Reply with the result only."

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._asked, self._right = 0, 0
        return self._ask(), {}

    def step(self, action: str) -> Answer:
        right = action.strip() == str(self._first + self._second)
        self._asked, self._right = self._asked + 1, self._right + right
        over = self._asked == 5
        text = f"{self._right} of 5 are right." if over else self._ask()
        return text, 0.2 * right, over, False, {"success": over and self._right == 5, "progression": self._right / 5}

    def _ask(self) -> str:
        self._first, self._second = (int(one) for one in self.np_random.integers(2, 40, size=2))
        return f"Sum {self._asked + 1}: {self._first} + {self._second} = ?"


class Haggling(_Plain):
    """Buy a lamp for less than its worth from a dealer who gets impatient."""

    system_prompt = (
        "You bargain for a lamp. Reply with your offer in whole coins, from 1 to 50. Your gain is what you save."
    )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._least = int(self.np_random.integers(15, 35))
        self._worth = self._least + int(self.np_random.integers(2, 15))
        self._asks = self._worth + 20
        return f"The lamp is worth {self._worth} coins to you. The dealer asks {self._asks}.", {}

    def step(self, action: str) -> Answer:
        said = action.strip()
        if not (said.isascii() and said.isdigit() and len(said) < 3 and 1 <= int(said) <= 50):
            return "The dealer did not understand and goes.", 0.0, True, False, {"invalid_action": True}
        offer = int(said)
        if offer >= self._least:
            return "Sold.", (self._worth - offer) / 20, True, False, {"invalid_action": False}
        self._asks -= 5
        if self._asks < self._worth or self.np_random.random() < 0.1:
            return "The dealer has had enough and goes.", 0.0, True, False, {"invalid_action": False}
        return f"Too little. The dealer asks {self._asks}.", 0.0, False, False, {"invalid_action": False}


class EightPuzzle(TextEnv):
    """Slide tiles until they are in order, with a reward at the end only."""

    actions: ClassVar = {way: f"move the blank {way}" for way in ("up", "down", "left", "right")}
    default_action = "up"
    max_turns = 30
    system_prompt = "Move the blank, written as 0, until the rows are 0 1 2, 3 4 5, 6 7 8."
    STEPS: ClassVar = {"up": -3, "down": 3, "left": -1, "right": 1}

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._tiles = list(range(9))
        while self._tiles == sorted(self._tiles):
            for _ in range(6):
                ways = [way for way in self.actions if self._target(way) is not None]
                self._slide(ways[int(self.np_random.integers(len(ways)))])

    def _act(self, action: str) -> tuple[float, bool]:
        self._slide(action)
        won = self._tiles == sorted(self._tiles)
        return float(won), won

    def _observe(self) -> tuple[str, str]:
        return "\n".join(" ".join(map(str, self._tiles[row : row + 3])) for row in (0, 3, 6)), ""

    def _target(self, way: str) -> int | None:
        blank = self._tiles.index(0)
        to = blank + self.STEPS[way]
        return to if 0 <= to < 9 and (way in ("up", "down") or to // 3 == blank // 3) else None

    def _slide(self, way: str) -> None:
        blank, to = self._tiles.index(0), self._target(way)
        if to is not None:
            self._tiles[blank], self._tiles[to] = self._tiles[to], 0


class Pig(TextEnv):
    """Roll a die and keep the sum in time: a one loses what was not kept."""

    actions: ClassVar = {"roll": "add a die to the open sum; a one loses it", "hold": "keep the open sum"}
    default_action = "hold"
    max_turns = 15
    system_prompt = "Keep 20 points within 15 turns."

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._kept = self._open = 0
        self._said = "Begin."

    def _act(self, action: str) -> tuple[float, bool]:
        if action == "hold":
            self._kept, self._open = self._kept + self._open, 0
            self._said = "You hold."
        else:
            die = int(self.np_random.integers(1, 7))
            self._open = 0 if die == 1 else self._open + die
            self._said = f"You roll a {die}."
        return (1.0, True) if self._kept >= 20 else (0.0, False)

    def _observe(self) -> tuple[str, str]:
        return f"{self._said} Open: {self._open}. Kept: {self._kept}. Turn {self.turn} of 15.", ""


class Maze(TextEnv):
    """A maze of which only the next fields are seen; each step costs a little."""

    actions: ClassVar = {"north": "", "south": "", "west": "", "east": ""}
    default_action = "north"
    max_turns = 40
    system_prompt = "Find the way out of the maze, which is in its south-east corner."
    STEPS: ClassVar = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
    SIZE = 4

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self._open: set[tuple[tuple[int, int], str]] = set()
        seen, path = {(0, 0)}, [(0, 0)]
        while path:
            ways = [
                way
                for way in self.actions
                if self._inside(self._to(path[-1], way)) and self._to(path[-1], way) not in seen
            ]
            if not ways:
                path.pop()
                continue
            way = ways[int(self.np_random.integers(len(ways)))]
            there = self._to(path[-1], way)
            back = {"north": "south", "south": "north", "west": "east", "east": "west"}[way]
            self._open |= {(path[-1], way), (there, back)}
            seen.add(there)
            path.append(there)
        self._here, self._bumped = (0, 0), False

    def _act(self, action: str) -> tuple[float, bool]:
        self._bumped = (self._here, action) not in self._open
        if not self._bumped:
            self._here = self._to(self._here, action)
        out = self._here == (self.SIZE - 1, self.SIZE - 1)
        return (1.0 if out else -0.01), out

    def _observe(self) -> tuple[str, str]:
        ways = ", ".join(way for way in self.actions if (self._here, way) in self._open)
        return f"{'You bump into a wall. ' * self._bumped}Ways lead {ways}.", ""

    def _to(self, place: tuple[int, int], way: str) -> tuple[int, int]:
        return place[0] + self.STEPS[way][0], place[1] + self.STEPS[way][1]

    def _inside(self, place: tuple[int, int]) -> bool:
        return all(0 <= one < self.SIZE for one in place)
