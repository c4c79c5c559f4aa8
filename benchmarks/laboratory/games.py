"""Small games that differ in what may matter to the choice of a recipe. Their texts have words of a fixed list only."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium

from agentrl_envs import TextEnv

WAIT = "wait"  # what a reply without an action does; it is no word of the models here
COMPASS = {"west": (-1, 0), "east": (1, 0), "north": (0, -1), "south": (0, 1)}


def numbered(letter: str, count: int) -> list[str]:
    """Return the words of the numbers below a count, such as x0, x1, x2."""
    return [f"{letter}{number}" for number in range(count)]


class WordGame(TextEnv):
    """A game whose texts and actions are single words, with a player that knows the best one.

    Args:
        moves: the actions that can be said; besides them there is one that does nothing.
        reads: the other words of its texts.
        limit: turns of an episode.
    """

    worker: Literal["inline"] = "inline"
    system_prompt = ""
    default_action = WAIT

    def __init__(self, moves: Sequence[str], reads: Sequence[str], limit: int) -> None:
        super().__init__()
        self.moves = tuple(moves)
        self.words = tuple(dict.fromkeys([*reads, *moves]))
        self.actions = dict.fromkeys((*moves, WAIT), "")
        self.max_turns = limit

    @abstractmethod
    def best(self) -> str:
        """Return a move that is best now."""

    def solver(self) -> Callable[[], str]:
        return self.best

    def drawn(self, count: int) -> int:
        """Return a random number below a count."""
        return int(self.np_random.integers(count))


class Signal(WordGame):
    """One turn: each of some signals has one right answer; luck decides what an answer pays.

    Args:
        signals: how many there are.
        luck: probability that a right answer pays 1; a wrong one does as often as a right one does not.
    """

    def __init__(self, signals: int = 12, luck: float = 0.8) -> None:
        super().__init__(["red", "green", "blue", "white", "black"], numbered("signal", signals), 1)
        self.signals, self.luck = signals, luck
        self.signal, self.right = 0, False

    def best(self) -> str:
        return self.moves[self.signal * 3 % len(self.moves)]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.signal, self.right = self.drawn(self.signals), False

    def _act(self, action: str) -> tuple[float, bool]:
        self.right = action == self.best()
        chance = self.luck if self.right else 1 - self.luck
        return float(self.np_random.random() < chance), True

    def _observe(self) -> tuple[str, str]:
        return f"signal{self.signal}", ""

    def success(self) -> bool:
        return self.right


class Sorting(WordGame):
    """Bring letters into the order of the alphabet by swaps of neighbours; every turn costs, the right order pays 1.

    Args:
        letters: how many there are.
        least: swaps that are needed at least.
        cost: of a turn.
        limit: turns of an episode.
    """

    def __init__(self, letters: int = 5, least: int = 6, cost: float = 0.1, limit: int = 20) -> None:
        self.letters = "abcdefgh"[:letters]
        super().__init__(["first", "second", "third", "fourth", "fifth", "sixth"][: letters - 1], self.letters, limit)
        self.least, self.cost = least, cost
        self.order = list(self.letters)

    def best(self) -> str:
        wrong = next(k for k in range(len(self.order) - 1) if self.order[k] > self.order[k + 1])
        return self.moves[wrong]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.order = list(self.letters)
        while self._swaps() < self.least:
            self.order = [self.letters[k] for k in self.np_random.permutation(len(self.letters))]

    def _swaps(self) -> int:
        return sum(a > b for k, a in enumerate(self.order) for b in self.order[k + 1 :])

    def _act(self, action: str) -> tuple[float, bool]:
        if action in self.moves:
            k = self.moves.index(action)
            self.order[k], self.order[k + 1] = self.order[k + 1], self.order[k]
        sorted_now = not self._swaps()
        return sorted_now - self.cost, sorted_now

    def _observe(self) -> tuple[str, str]:
        return " ".join(self.order), ""


class Safe(WordGame):
    """Open a safe of a known kind by the right turns one after the other; a wrong one begins anew. Opening pays 1.

    Args:
        kinds: of safes, each with a combination of its own.
        length: of the combinations.
        limit: turns of an episode.
    """

    def __init__(self, kinds: int = 6, length: int = 6, limit: int = 24) -> None:
        reads = numbered("safe", kinds) + numbered("place", length + 1)
        super().__init__(["left", "right", "push", "pull"], reads, limit)
        self.kinds, self.length = kinds, length
        self.kind, self.place = 0, 0

    def best(self) -> str:
        return self.moves[(self.kind + self.kind * self.place + 3 * self.place) % len(self.moves)]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.kind, self.place = self.drawn(self.kinds), 0

    def _act(self, action: str) -> tuple[float, bool]:
        self.place = self.place + 1 if action == self.best() else 0
        opened = self.place == self.length
        return float(opened), opened

    def _observe(self) -> tuple[str, str]:
        return f"safe{self.kind} place{self.place}", ""


class Field(WordGame):
    """Walk from the west edge of a field to a row of its east edge, which pays 1.

    Args:
        width: of the field.
        wind: probability that a step goes north or south instead.
        clutter: random words in each text, which mean nothing.
        limit: turns of an episode.
    """

    rows = 5

    def __init__(self, width: int = 7, wind: float = 0.0, clutter: int = 0, limit: int = 20) -> None:
        reads = numbered("x", width) + numbered("y", self.rows) + numbered("goal", self.rows)
        super().__init__(list(COMPASS), reads + numbered("noise", 16 if clutter else 0), limit)
        self.width, self.wind, self.clutter = width, wind, clutter
        self.x, self.y, self.goal = 0, 0, 0

    def best(self) -> str:
        if self.x < self.width - 1:
            return "east"
        return "south" if self.y < self.goal else "north"

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.x, self.y, self.goal = 0, self.drawn(self.rows), self.drawn(self.rows)

    def _act(self, action: str) -> tuple[float, bool]:
        if self.np_random.random() < self.wind and action != WAIT:
            action = ("north", "south")[self.drawn(2)]
        dx, dy = COMPASS.get(action, (0, 0))
        self.x = min(max(self.x + dx, 0), self.width - 1)
        self.y = min(max(self.y + dy, 0), self.rows - 1)
        arrived = (self.x, self.y) == (self.width - 1, self.goal)
        return float(arrived), arrived

    def _observe(self) -> tuple[str, str]:
        said = [f"x{self.x}", f"y{self.y}", f"goal{self.goal}"]
        return " ".join(said + [f"noise{self.drawn(16)}" for _ in range(self.clutter)]), ""


class Road(WordGame):
    """Follow the sign of each crossing to the end of a road, which pays 1; stopping anywhere pays less and ends it.

    Args:
        length: crossings of the road; a wrong way leads back to the same one, with another sign.
        inn: what stopping pays.
        limit: turns of an episode.
    """

    def __init__(self, length: int = 10, inn: float = 0.3, limit: int = 30) -> None:
        reads = numbered("mile", length + 1) + numbered("sign", 6)
        super().__init__(["left", "straight", "right", "stop"], reads, limit)
        self.length, self.inn = length, inn
        self.mile, self.sign = 0, 0

    def best(self) -> str:
        return self.moves[self.sign % 3]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.mile, self.sign = 0, self.drawn(6)

    def _act(self, action: str) -> tuple[float, bool]:
        if action == "stop":
            return self.inn, True
        self.mile += action == self.best()
        self.sign = self.drawn(6)
        return float(self.success()), self.success()

    def _observe(self) -> tuple[str, str]:
        return f"mile{self.mile} sign{self.sign}", ""

    def success(self) -> bool:
        return self.mile == self.length


class Harvest(WordGame):
    """Pick all berries of a square garden; each pays its share of 1 at once. The text tells the way to the nearest.

    Args:
        size: of the garden.
        berries: how many there are.
        limit: turns of an episode.
    """

    def __init__(self, size: int = 6, berries: int = 4, limit: int = 24) -> None:
        ways = [word for name in COMPASS for word in numbered(name, size)]
        super().__init__(list(COMPASS), [*ways, *numbered("left", berries + 1)], limit)
        self.size, self.berries = size, berries
        self.here, self.left = (0, 0), [(0, 0)]

    def best(self) -> str:
        dx, dy = self._way()
        if dx:
            return "east" if dx > 0 else "west"
        return "south" if dy > 0 else "north"

    def _way(self) -> tuple[int, int]:
        """Return the steps east and south to the nearest berry."""
        x, y = self.here
        ways = [(to_x - x, to_y - y) for to_x, to_y in self.left]
        return min(ways, key=lambda way: (abs(way[0]) + abs(way[1]), way), default=(0, 0))

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        places = self.np_random.permutation(self.size**2)[: self.berries + 1].tolist()
        self.here, *self.left = [divmod(place, self.size) for place in places]

    def _act(self, action: str) -> tuple[float, bool]:
        dx, dy = COMPASS.get(action, (0, 0))
        self.here = (min(max(self.here[0] + dx, 0), self.size - 1), min(max(self.here[1] + dy, 0), self.size - 1))
        picked = self.here in self.left
        self.left = [berry for berry in self.left if berry != self.here]
        return picked / self.berries, not self.left

    def _observe(self) -> tuple[str, str]:
        dx, dy = self._way()
        across, along = "east" if dx >= 0 else "west", "south" if dy >= 0 else "north"
        return f"{across}{abs(dx)} {along}{abs(dy)} left{len(self.left)}", ""

    def success(self) -> bool:
        return not self.left


class Beam(WordGame):
    """Stay on a beam in gusts of wind; every turn on it pays its share of 1, falling ends it, lasting is success.

    Args:
        length: places of the beam.
        limit: turns of an episode.
    """

    def __init__(self, length: int = 11, limit: int = 40) -> None:
        super().__init__(["left", "hold", "right"], numbered("place", length) + numbered("speed", 5), limit)
        self.length = length
        self.place, self.speed = 0, 0

    def best(self) -> str:
        off = self.place - self.length // 2
        pushes = (0, -1, 1)  # the first of equal ones is taken
        push = min(pushes, key=lambda push: abs(off + 3 * min(max(self.speed + push, -2), 2)))
        return self.moves[push + 1]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.place, self.speed = self.length // 2 + self.drawn(3) - 1, 0

    @property
    def fallen(self) -> bool:
        return not 0 <= self.place < self.length

    def _act(self, action: str) -> tuple[float, bool]:
        push = {"left": -1, "right": 1}.get(action, 0)
        gust = (-1, 0, 0, 0, 0, 1)[self.drawn(6)]
        self.speed = min(max(self.speed + push + gust, -2), 2)
        self.place += self.speed
        return (0.0 if self.fallen else 1 / self.max_turns), self.fallen

    def _observe(self) -> tuple[str, str]:
        return f"place{min(max(self.place, 0), self.length - 1)} speed{self.speed + 2}", ""

    def success(self) -> bool:
        return self.turn >= self.max_turns and not self.fallen


class Journey(WordGame):
    """Pack what the forecast asks for; days later that pays 1. On the way coins are found and lost, whatever one does.

    Args:
        days: of the journey.
        coin: what is found or lost in a day, with equal chances.
    """

    def __init__(self, days: int = 12, coin: float = 0.1) -> None:
        items = ["coat", "boots", "hat", "scarf", "gloves", "stick"]
        reads = [*numbered("day", days + 1), *numbered("forecast", len(items)), "nothing"]
        super().__init__(items, reads, days)
        self.days, self.coin = days, coin
        self.day, self.forecast, self.packed = 0, 0, "nothing"

    def best(self) -> str:
        return self.moves[(self.forecast * 5 + 2) % len(self.moves)]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.day, self.forecast, self.packed = 0, self.drawn(len(self.moves)), "nothing"

    def _act(self, action: str) -> tuple[float, bool]:
        if not self.day and action != WAIT:
            self.packed = action
        self.day += 1
        over = self.day == self.days
        return self.coin * (2 * self.drawn(2) - 1) + self.success(), over

    def _observe(self) -> tuple[str, str]:
        return f"day{self.day} forecast{self.forecast} {self.packed}", ""

    def success(self) -> bool:
        return self.day == self.days and self.packed == self.best()


class Jobs(WordGame):
    """Work off a job of random length, few of them very long, with the right tool for each part; it pays 1 at its end.

    Args:
        shortest: parts of a job.
        longest: parts of a job.
        tail: exponent by which longer jobs are rarer.
    """

    def __init__(self, shortest: int = 3, longest: int = 40, tail: float = 1.5) -> None:
        most = longest // 4
        reads = [*numbered("parts", longest + 1), *numbered("part", 8), *numbered("spare", most + 1), "spoilt"]
        super().__init__(["saw", "drill", "file", "hammer"], reads, longest)
        self.lengths = range(shortest, longest + 1)
        weights = [length**-tail for length in self.lengths]
        self.chances = [weight / sum(weights) for weight in weights]
        self.parts, self.part, self.spare = shortest, 0, 0

    def best(self) -> str:
        return self.moves[self.part * 3 % len(self.moves)]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.parts = int(self.np_random.choice(self.lengths, p=self.chances))
        self.part, self.spare = self.drawn(8), self.parts // 4

    def _act(self, action: str) -> tuple[float, bool]:
        self.spare = max(self.spare - (action != self.best()), -1)
        self.parts -= 1
        self.part = self.drawn(8)
        return float(self.success()), not self.parts

    def _observe(self) -> tuple[str, str]:
        return f"parts{self.parts} part{self.part} {'spoilt' if self.spare < 0 else f'spare{self.spare}'}", ""

    def success(self) -> bool:
        return not self.parts and self.spare >= 0


GAMES = (Signal, Sorting, Safe, Field, Road, Harvest, Beam, Journey, Jobs)
for game in GAMES:
    gymnasium.register(f"{game.__name__}-v0", entry_point=f"{__name__}:{game.__name__}")
