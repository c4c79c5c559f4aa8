"""Search for shortest solutions."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from agentrl_envs.baba.elements import Stack
from agentrl_envs.baba.world import MOVES, World

Cells = tuple[Stack, ...]


class Search(NamedTuple):
    """Result of a search.

    Args:
        moves: moves of the shortest solution; None if the search found no solution.
        complete: whether the search found no solution after it examined all reachable worlds, so that none exists.
        states: number of distinct worlds that the search examined.
    """

    moves: tuple[str, ...] | None
    complete: bool
    states: int


def search(world: World, max_states: int) -> Search:
    """Search breadth first for the shortest solution, and give up after `max_states` distinct worlds."""
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
    """Return a player that follows the shortest solution from the current world, or idles if no solution is found.

    Args:
        current: function that returns the current world of the game.
        max_states: largest number of worlds in each search; see :func:`search`.
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
