"""Key and door: a game whose horizon, noise and temptation are known, so that everything about it can be computed.

Three rows and a wall with a door in its middle. The key lies in the leftmost column, the goal in the rightmost one,
each in the first or the last row, which makes four maps. Walking onto the key takes it, and the door lets pass who has
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import gymnasium

from agentrl_envs import TextEnv

WIDTHS = {7: 5, 12: 9, 24: 17}  # by horizon, the turns of the shortest way from a start to the goal
ROWS = 3
MOVES = {"west": (-1, 0), "east": (1, 0), "north": (0, -1), "south": (0, 1)}
STAY = "stay"  # what a reply without an action does; it is no word of the models here
ACTIONS = (*MOVES, STAY)


class State(NamedTuple):
    """What the player knows: it is all there is."""

    x: int
    y: int
    has_key: bool
    key_row: int
    goal_row: int

    @property
    def words(self) -> str:
        return f"x{self.x} y{self.y} {'key' if self.has_key else 'none'} k{self.key_row} g{self.goal_row}"


@dataclass(frozen=True)
class Rules:
    """What happens in each state.

    Args:
        horizon: turns of the shortest way: 7, 12 or 24.
        slip: probability that an action is replaced by a random one.
        lure: reward of a cell beside the door, off every shortest way, that ends the episode; 0: there is none.
    """

    horizon: int = 12
    slip: float = 0.0
    lure: float = 0.0

    def __post_init__(self) -> None:
        if self.horizon not in WIDTHS:
            raise ValueError(f"horizon must be one of {', '.join(map(str, WIDTHS))}, got {self.horizon}")
        for name in ("slip", "lure"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}")

    @property
    def width(self) -> int:
        return WIDTHS[self.horizon]

    @property
    def wall(self) -> int:
        return self.width // 2

    @property
    def max_turns(self) -> int:
        """Limit of an episode."""
        return 2 * self.horizon

    def moved(self, state: State, action: str) -> State:
        """Return where an action leads that does not slip."""
        dx, dy = MOVES.get(action, (0, 0))
        x, y = state.x + dx, state.y + dy
        inside = 0 <= x < self.width and 0 <= y < ROWS
        closed = x == self.wall and (y != 1 or not state.has_key)
        if not inside or closed:
            return state
        return state._replace(x=x, y=y, has_key=state.has_key or (x, y) == (0, state.key_row))

    def outcomes(self, state: State, action: str) -> dict[State, float]:
        """Return the probabilities of the states that an action leads to; one that stays does not slip."""
        chances: dict[State, float] = {}
        straight = 1.0 if action == STAY else 1 - self.slip
        slips = {} if action == STAY else dict.fromkeys(MOVES, self.slip / len(MOVES))
        for taken, chance in [(action, straight), *slips.items()]:
            if chance:
                after = self.moved(state, taken)
                chances[after] = chances.get(after, 0.0) + chance
        return chances

    def at_goal(self, state: State) -> bool:
        return (state.x, state.y) == (self.width - 1, state.goal_row)

    def at_lure(self, state: State) -> bool:
        return self.lure > 0 and (state.x, state.y) == (self.wall - 1, ROWS - 1 - state.key_row)

    def reward(self, state: State) -> float:
        """Return what coming here pays."""
        return 1.0 if self.at_goal(state) else self.lure if self.at_lure(state) else 0.0

    def ends(self, state: State) -> bool:
        return self.at_goal(state) or self.at_lure(state)


@cache
def distances(rules: Rules) -> Mapping[State, int]:
    """Return the turns to the goal of every state that can be met and from which the episode goes on, by state."""
    found: dict[State, int] = {}
    for key_row in (0, ROWS - 1):
        for goal_row in (0, ROWS - 1):
            places = [
                state
                for has_key in (False, True)
                for x in range(rules.width)
                for y in range(ROWS)
                if _met(rules, state := State(x, y, has_key, key_row, goal_row))
            ]
            ways = {s: [rules.moved(s, action) for action in MOVES] for s in places if not rules.ends(s)}
            turns = {state: 0 for state in places if rules.at_goal(state)}
            while near := [s for s in ways if s not in turns and any(after in turns for after in ways[s])]:
                turns |= dict.fromkeys(near, max(turns.values()) + 1)
            found |= {state: turns[state] for state in ways}
    return found


def _met(rules: Rules, state: State) -> bool:
    if state.x == rules.wall and (state.y != 1 or not state.has_key):
        return False
    return state.has_key or (state.x < rules.wall and (state.x, state.y) != (0, state.key_row))


@cache
def starts(rules: Rules) -> tuple[State, ...]:
    """Return the states in which episodes begin: without the key, a shortest way of the horizon before the goal."""
    return tuple(state for state, turns in distances(rules).items() if not state.has_key and turns == rules.horizon)


@cache
def best_actions(rules: Rules, state: State) -> tuple[str, ...]:
    """Return the moves that begin a shortest way to the goal."""
    turns = distances(rules)
    after = {action: rules.moved(state, action) for action in MOVES}
    left = {action: 0 if rules.at_goal(there) else turns.get(there, rules.max_turns) for action, there in after.items()}
    return tuple(action for action in MOVES if left[action] == min(left.values()))


class KeyDoor(TextEnv):
    """The game as an environment; reaching the goal is success.

    Args:
        horizon: see :class:`Rules`.
        slip: see :class:`Rules`.
        lure: see :class:`Rules`.
        limit: turns of an episode; those of the rules when not given.
    """

    worker: Literal["inline"] = "inline"
    system_prompt = ""
    default_action = STAY
    actions = dict.fromkeys(ACTIONS, "")

    def __init__(self, horizon: int = 12, slip: float = 0.0, lure: float = 0.0, limit: int | None = None) -> None:
        super().__init__()
        self.rules = Rules(horizon, slip, lure)
        self.limit = self.rules.max_turns if limit is None else limit
        self.max_turns = self.limit
        self.state = starts(self.rules)[0]

    def _start(self, seed: int | None, options: dict[str, Any] | None) -> None:
        found = starts(self.rules)
        self.state = found[int(self.np_random.integers(len(found)))]

    def _act(self, action: str) -> tuple[float, bool]:
        if self.rules.slip and action != STAY and self.np_random.random() < self.rules.slip:
            action = list(MOVES)[int(self.np_random.integers(len(MOVES)))]
        self.state = self.rules.moved(self.state, action)
        return self.rules.reward(self.state), self.rules.ends(self.state)

    def _observe(self) -> tuple[str, str]:
        return self.state.words, ""

    def success(self) -> bool:
        return self.rules.at_goal(self.state)

    def solver(self) -> Callable[[], str]:
        return lambda: best_actions(self.rules, self.state)[0]


gymnasium.register("KeyDoor-v0", entry_point=KeyDoor)
