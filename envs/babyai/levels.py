"""The BabyAI levels: the five goals of MixedTrainLocal, Minigrid's small go-to rooms, and other levels of Minigrid."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import load_env_creator

from agentrl_envs.babyai import words

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # Minigrid imports pygame, which prints a greeting

try:
    from minigrid.core.roomgrid import RoomGrid
    from minigrid.core.world_object import WorldObj
    from minigrid.envs.babyai import GoToLocal, GoToObj, GoToRedBallNoDists
    from minigrid.envs.babyai.core.roomgrid_level import RejectSampling, RoomGridLevel
    from minigrid.envs.babyai.core.verifier import (
        AfterInstr,
        BeforeInstr,
        GoToInstr,
        Instr,
        ObjDesc,
        OpenInstr,
        PickupInstr,
        PutNextInstr,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'The BabyAI environments need {error.name}, which is not installed: pip install "lightning-agentrl[envs]"',
        name=error.name,
    ) from error

HELD_OUT = ("yellow box", "red key", "red door", "green ball", "grey door")
"""Pairs that no mission of the five goals contains, so that tests of generalisation can use them."""

_DOOR_COLOURS = ("yellow", "green", "blue", "purple")
_MAX_DRAWS = 1000


class _Redraw(RoomGridLevel):
    """Redraw rejected levels without output; Minigrid's own loop prints a line for every rejected level."""

    instrs: Any  # the type of the instruction depends on the level

    def _gen_grid(self, width: int, height: int) -> None:
        for _ in range(_MAX_DRAWS):
            RoomGrid._gen_grid(self, width, height)
            try:
                self.gen_mission()
                self.validate_instrs(self.instrs)
            except (RejectSampling, RecursionError):  # Minigrid raises RecursionError if no cell is free
                continue
            self.surface = self.mission = self.instrs.surface(self)
            return
        raise RuntimeError(f"{type(self).__name__}: no valid level in {_MAX_DRAWS} draws.")


class GoToObjRoom(_Redraw, GoToObj):
    """Level of one room with one object."""


class GoToLocalRoom(_Redraw, GoToLocal):
    """Level of one room with several objects, one of which is the target."""


class GoToRedBallRoom(_Redraw, GoToRedBallNoDists):
    """Level of one room of size 8 with a red ball."""


class MixedTrainLocal(_Redraw):
    """Level of one room (two rooms for `open`) of size 8 with the objects of the goal and `num_dists` others.

    Args:
        goal: goal of the mission: "goto", "pickup", "open", "putnext" or "pick_up_seq_go_to".
        num_dists: number of distracting objects, which the goal does not need.
        max_steps: step limit; by default 64 per room and navigation.
    """

    def __init__(self, goal: str, num_dists: int = 0, max_steps: int | None = None, **kwargs: Any) -> None:
        makers: dict[str, Callable[[], Instr]] = {
            "goto": self._goto,
            "pickup": self._pickup,
            "open": self._open,
            "putnext": self._putnext,
            "pick_up_seq_go_to": self._pick_up_seq_go_to,
        }
        if goal not in makers:
            raise ValueError(f"Unknown goal {goal!r}; the goals are {', '.join(makers)}.")
        self.goal = goal
        self.num_dists = num_dists
        self._make_instr = makers[goal]
        columns = 2 if goal == "open" else 1
        super().__init__(room_size=8, num_rows=1, num_cols=columns, max_steps=max_steps, **kwargs)

    def gen_mission(self) -> None:
        """Fill the room(s) and draw the instruction; raise RejectSampling to request another draw."""
        self.instrs = self._make_instr()
        self.check_objs_reachable()
        text = self.instrs.surface(self)
        if any(pair in text for pair in HELD_OUT):
            raise RejectSampling("the mission names a held-out pair")

    def _goto(self) -> Instr:
        return GoToInstr(_named(self._rand_elem(self._fill_room(1 + self.num_dists))))

    def _pickup(self) -> Instr:
        return PickupInstr(_named(self._rand_elem(self._fill_room(1 + self.num_dists))))

    def _putnext(self) -> Instr:
        move, fixed = self._two_targets()
        return PutNextInstr(_named(move), _named(fixed))

    def _pick_up_seq_go_to(self) -> Instr:
        first, second = self._two_targets()
        pick_up, go_to = PickupInstr(_named(first)), GoToInstr(_named(second))
        return BeforeInstr(pick_up, go_to) if self._rand_bool() else AfterInstr(go_to, pick_up)

    def _open(self) -> Instr:
        colour = self._rand_elem(_DOOR_COLOURS)
        locked_room = int(self._rand_int(0, 2))
        other_room = 1 - locked_room
        self.agent_pos = (-1, -1)  # the agent is outside the grid, so that any cell can get an object
        self.add_door(locked_room, 0, door_idx=0 if locked_room == 0 else 2, color=colour, locked=True)
        self.add_object(other_room, 0, "key", colour)
        self.add_distractors(num_distractors=self.num_dists, all_unique=False)
        self.place_agent(other_room, 0)
        return OpenInstr(ObjDesc("door", colour if self._rand_bool() else None))

    def _fill_room(self, count: int) -> list[WorldObj]:
        self.place_agent()
        return self.add_distractors(num_distractors=count, all_unique=False)

    def _two_targets(self) -> tuple[WorldObj, WorldObj]:
        first, second = self._rand_subset(self._fill_room(2 + self.num_dists), 2)
        if (first.type, first.color) == (second.type, second.color):
            raise RejectSampling("both targets have the same name")
        return first, second


def _named(thing: WorldObj) -> ObjDesc:
    return ObjDesc(thing.type, thing.color)


@dataclass(frozen=True)
class Level:
    """A named level: the function that builds the level, its default turn limit, and its actions."""

    build: Callable[..., RoomGridLevel]
    kwargs: Mapping[str, Any]
    max_turns: int | None
    """Default turn limit; None means that the limit depends on the mission of each episode."""
    needs: tuple[str, ...] = ("go forward",)
    """Actions without which the level cannot be solved."""
    table: tuple[str, ...] = words.FULL_ACTIONS
    """Actions that the goal of the level can use."""
    small: bool = False
    """Whether the level uses the short names of the movements and a short prompt by default."""


_MOVES = words.FULL_ACTIONS[:3]
_HANDS = (*_MOVES, "pick up", "drop")

LEVELS: dict[str, Level] = {
    "GoTo": Level(MixedTrainLocal, {"goal": "goto"}, 64, table=_MOVES),
    "PickUp": Level(MixedTrainLocal, {"goal": "pickup"}, 64, ("pick up",), _HANDS),
    "Open": Level(MixedTrainLocal, {"goal": "open"}, 128, ("pick up", "toggle")),
    "PutNext": Level(MixedTrainLocal, {"goal": "putnext"}, 128, ("pick up", "drop"), _HANDS),
    "PickUpSeqGoTo": Level(MixedTrainLocal, {"goal": "pick_up_seq_go_to"}, 128, ("pick up",), _HANDS),
    **{
        name: Level(build, kwargs, max_turns, table=words.SHORT_ACTIONS, small=True)
        for name, build, kwargs, max_turns in (
            ("GoToObjS4", GoToObjRoom, {"room_size": 4}, 16),
            ("GoToObjS6", GoToObjRoom, {"room_size": 6}, 36),
            ("GoToLocalS5N2", GoToLocalRoom, {"room_size": 5, "num_dists": 2}, 25),
            ("GoToLocalS6N2", GoToLocalRoom, {"room_size": 6, "num_dists": 2}, 36),
            ("GoToRedBallNoDists", GoToRedBallRoom, {}, 64),
        )
    },
}
"""Name of a level in an environment id -> level."""

_BROKEN = (
    "BabyAI-PutNextS5N2Carrying-v0",
    "BabyAI-PutNextS6N3Carrying-v0",
    "BabyAI-PutNextS7N4Carrying-v0",
    "BabyAI-KeyInBox-v0",
)


def find_level(name: str) -> Level:
    """Return a level by its name in `LEVELS`, or by its Minigrid id such as "BabyAI-GoToLocalS8N7-v0".

    Raises:
        ValueError: there is no such level, or its missions cannot be carried out.
    """
    if name in LEVELS:
        return LEVELS[name]
    if name in _BROKEN:
        raise ValueError(f"Minigrid's level {name!r} is broken: its missions cannot be carried out.")
    if not (name.startswith("BabyAI-") and name in gymnasium.registry):
        raise ValueError(
            f"Unknown BabyAI level {name!r}; the levels are {', '.join(LEVELS)}, and Minigrid's ids that begin with "
            '"BabyAI-".'
        )
    spec = gymnasium.spec(name)
    return Level(partial(_minigrid_level, str(spec.entry_point)), spec.kwargs, None)


def _minigrid_level(entry_point: str, **kwargs: Any) -> RoomGridLevel:
    level: Any = load_env_creator(entry_point)(**kwargs)
    level._gen_grid = partial(_Redraw._gen_grid, level)  # replaces the loop of Minigrid's class, which prints
    return cast(RoomGridLevel, level)
