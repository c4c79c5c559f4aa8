"""Observations of gymnasium's and minigrid's games in words, for the adapter of discrete actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

MOVES = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
_FACING = ("east", "south", "west", "north")
_DOORS = ("open", "closed", "locked")


def minigrid(observation: Mapping[str, Any]) -> str:
    """Tell mission, direction, what is carried, and everything in view with its place."""
    image = observation["image"]
    middle, near = image.shape[0] // 2, image.shape[1] - 1
    lines = [f"Mission: {observation['mission']}.", f"You face {_FACING[observation['direction']]}."]
    if (held := _thing(image[middle, near])) not in ("empty", "unseen"):
        lines.append(f"You carry: {held}.")
    seen = []
    for ahead in range(near + 1):
        for side in range(image.shape[0]):
            thing = _thing(image[side, near - ahead])
            if thing in ("unseen", "empty") or (ahead == 0 and side == middle) or (thing == "wall" and side != middle):
                continue
            aside = side - middle
            seen.append(f"{thing} {ahead} ahead" + (f" {abs(aside)} {'right' if aside > 0 else 'left'}" * bool(aside)))
    return "\n".join([*lines, f"You see: {'; '.join(seen) or 'nothing'}."])


def numbers(observation: Any) -> str:
    """Tell a vector."""
    return "State: " + ", ".join(f"{value:.2f}" for value in observation)


def _thing(cell: Any) -> str:
    kind = IDX_TO_OBJECT[int(cell[0])]
    if kind in ("unseen", "empty", "wall", "floor", "goal", "lava"):
        return "empty" if kind == "floor" else kind
    state = f"{_DOORS[int(cell[2])]} " if kind == "door" else ""
    return f"{state}{IDX_TO_COLOR[int(cell[1])]} {kind}"
