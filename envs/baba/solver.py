"""Search for the shortest way to win."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from agentrl_envs.baba.elements import Stack
from agentrl_envs.baba.world import MOVES, World

Cells = tuple[Stack, ...]


class Search(NamedTuple):
    """What a search found.

    Args:
        moves: the shortest way to win; None if none was found.
        complete: whether there is none indeed, if none was found: all that can be reached was looked at.
        states: how many different worlds were looked at.
    """

    moves: tuple[str, ...] | None
    complete: bool
    states: int


def search(world: World, max_states: int) -> Search:
    """Look breadth first for the shortest way to win, and give up after `max_states` different worlds."""
    before: dict[Cells, tuple[Cells, str] | None] = {world.cells: None}
    queue = deque([world])
    while queue:
        here = queue.popleft()
        for move in MOVES:
            following, outcome = here.after(move)
            if outcome == "win":
                moves = [move]
                link = before[here.cells]
                while link is not None:
                    cells, move = link
                    moves.append(move)
                    link = before[cells]
                return Search(tuple(moves[::-1]), True, len(before))
            if not outcome and following.cells not in before:
                before[following.cells] = (here.cells, move)
                queue.append(following)
                if len(before) >= max_states:
                    return Search(None, False, len(before))
    return Search(None, True, len(before))


def player(current: Callable[[], World], max_states: int = 50_000) -> Callable[[], str]:
    """Return a player that goes the shortest way to win from whatever world it finds, and idles where it knows none.

    Args:
        current: returns the world of the game that is played.
        max_states: limit of each search, see :func:`search`.
    """
    plan: dict[Cells, str] = {}

    def choose() -> str:
        world = current()
        if world.cells not in plan:
            plan.clear()
            plan[world.cells] = "idle"
            for move in search(world, max_states).moves or ():
                plan[world.cells] = move
                world, _ = world.after(move)
        return plan[current().cells]

    return choose
