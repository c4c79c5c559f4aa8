"""A scripted player of Crafter that sees the whole map: it stays alive, and works through a list of achievements."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from agentrl_envs.crafter.game import Game
from agentrl_envs.crafter.text import NAMES

Cell = tuple[int, int]

_MOVES = {(-1, 0): "Move West", (1, 0): "Move East", (0, -1): "Move North", (0, 1): "Move South"}
_WALKABLE = ("grass", "path", "sand")
_SOURCES = {"wood": "tree", "stone": "stone", "coal": "coal", "iron": "iron", "sapling": "grass"}
_TOOLS = {"stone": "wood_pickaxe", "coal": "wood_pickaxe", "iron": "stone_pickaxe", "diamond": "iron_pickaxe"}

# Each entry: achievement; items needed in the inventory; things needed nearby; things needed ahead; action. The plan
# reaches `collect_wood` and `wake_up` without an entry, and does not attempt `eat_plant`.
_PLAN: tuple[tuple[str, dict[str, int], tuple[str, ...], tuple[str, ...], str], ...] = (
    ("collect_sapling", {}, (), ("grass",), "Do"),
    ("place_plant", {"sapling": 1}, (), ("grass",), "Place Plant"),
    ("place_table", {"wood": 4}, (), _WALKABLE, "Place Table"),
    ("make_wood_pickaxe", {"wood": 1}, ("table",), (), "Make Wood Pickaxe"),
    ("make_wood_sword", {"wood": 1}, ("table",), (), "Make Wood Sword"),
    ("collect_drink", {}, (), ("water",), "Do"),
    ("eat_cow", {}, (), ("cow",), "Do"),
    ("collect_stone", {}, (), ("stone",), "Do"),
    ("place_stone", {"stone": 1}, (), _WALKABLE, "Place Stone"),
    ("make_stone_pickaxe", {"wood": 1, "stone": 1}, ("table",), (), "Make Stone Pickaxe"),
    ("make_stone_sword", {"wood": 1, "stone": 1}, ("table",), (), "Make Stone Sword"),
    ("defeat_zombie", {}, (), ("zombie",), "Do"),
    ("collect_coal", {}, (), ("coal",), "Do"),
    ("collect_iron", {}, (), ("iron",), "Do"),
    ("place_furnace", {"wood": 2, "stone": 4}, ("table",), _WALKABLE, "Place Furnace"),
    ("make_iron_pickaxe", {"wood": 1, "coal": 1, "iron": 1}, ("table", "furnace"), (), "Make Iron Pickaxe"),
    ("make_iron_sword", {"wood": 1, "coal": 1, "iron": 1}, ("table", "furnace"), (), "Make Iron Sword"),
    ("collect_diamond", {}, (), ("diamond",), "Do"),
    ("defeat_skeleton", {}, (), ("skeleton",), "Do"),
)


class Player:
    """Scripted player that chooses an action in any state of a game, sees the whole map and has no memory.

    Args:
        game: running game.
    """

    def __init__(self, game: Game) -> None:
        self._game = game

    def __call__(self) -> str:
        """Return an action that keeps the player alive, or else an action for the first open step of the plan."""
        self._map = self._game.map()
        self._held = self._game.player.inventory
        self._place = (int(self._game.player.pos[0]), int(self._game.player.pos[1]))
        return next((action for action in self._options() if action), "Noop")

    def _options(self) -> Iterator[str | None]:
        if "zombie" in map(self._name, self._around(self._place)):
            yield self._do("Do", ahead=("zombie",))
        if self._held["energy"] < (3 if "wake_up" in self._game.unlocked else 9):
            yield "Sleep"
        if self._held["drink"] < 4:
            yield self._do("Do", ahead=("water",))
        if self._held["food"] < 4:
            yield self._do("Do", ahead=("cow",))
        for achievement, items, nearby, ahead, action in _PLAN:
            if achievement not in self._game.unlocked:
                lacking = next((item for item, amount in items.items() if self._held[item] < amount), None)
                yield self._do("Do", ahead=(_SOURCES[lacking],)) if lacking else self._do(action, nearby, ahead)

    def _do(self, action: str, nearby: Sequence[str] = (), ahead: Sequence[str] = ()) -> str | None:
        """Return the action if the player's place allows it, else a move towards such a place; None without a path."""
        if not all(self._held[_TOOLS[name]] for name in ahead if name in _TOOLS):
            return None

        def right(cell: Cell) -> bool:
            if ahead and not any(self._name(neighbour) in ahead for neighbour in self._around(cell)):
                return False
            x, y = cell
            square = ((x + east, y + south) for east in (-1, 0, 1) for south in (-1, 0, 1))
            return not nearby or {self._name(place) for place in square}.issuperset(nearby)

        first = self._first_step(right)
        if first is None:
            return None
        facing = tuple(int(step) for step in self._game.player.facing)
        front = (self._place[0] + facing[0], self._place[1] + facing[1])
        if first != self._place:
            return "Do" if first == front and self._name(first) == "stone" else self._towards(first)
        if not ahead or self._name(front) in ahead:
            return action
        return self._towards(next(cell for cell in self._around(self._place) if self._name(cell) in ahead))

    def _first_step(self, right: Callable[[Cell], bool]) -> Cell | None:
        """Return the next cell on the shortest path to a right cell, or the player's own cell; None without a path."""
        passable = (*_WALKABLE, "stone") if self._held["wood_pickaxe"] else _WALKABLE
        before: dict[Cell, Cell] = {self._place: self._place}
        queue = deque([self._place])
        while queue:
            cell = queue.popleft()
            if right(cell):
                while before[cell] != self._place:
                    cell = before[cell]
                return cell
            for following in self._around(cell):
                if following not in before and self._name(following) in passable:
                    before[following] = cell
                    queue.append(following)
        return None

    def _towards(self, cell: Cell) -> str:
        return _MOVES[cell[0] - self._place[0], cell[1] - self._place[1]]

    def _name(self, cell: Cell) -> str:
        x, y = cell
        inside = 0 <= x < self._map.shape[0] and 0 <= y < self._map.shape[1]
        return NAMES[self._map[x, y]] if inside else ""

    def _around(self, cell: Cell) -> list[Cell]:
        return [(cell[0] + east, cell[1] + south) for east, south in _MOVES]
