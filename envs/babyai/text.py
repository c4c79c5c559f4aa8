"""Description of BabyAI views in words, from encoded partial views; Minigrid is not needed."""

import numpy as np
from numpy.typing import NDArray

# Codes of Minigrid's observation encoding (type, colour, state).
_TYPES = {3: "floor", 4: "door", 5: "key", 6: "ball", 7: "box", 8: "goal", 9: "lava"}
_COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
_DOOR_STATES = ("open", "closed", "locked")
_UNSEEN, _EMPTY, _WALL, _DOOR = 0, 1, 2, 4

CARRIED = "You carry"


def describe_view(view: NDArray[np.integer]) -> list[str]:
    """Return the lines of an observation: the carried object, walls ahead, left and right, then all visible objects.

    Args:
        view: the agent's view, `view[column, row] = (type, colour, state)`, after the visibility mask. The agent is
            in the middle of the last row and looks towards row 0; the agent's cell holds the carried object.
    """
    column, row = view.shape[0] // 2, view.shape[1] - 1
    lines = []
    if int(view[column, row, 0]) in _TYPES:
        lines.append(f"{CARRIED} {_name(view[column, row])}")
    lines += _walls(view, column, row)
    for x in range(view.shape[0]):
        for y in range(view.shape[1]):
            if (x, y) != (column, row) and int(view[x, y, 0]) in _TYPES:
                lines.append(f"{_name(view[x, y])} {_where(x - column, row - y)}")
    return lines


def _walls(view: NDArray[np.integer], column: int, row: int) -> list[str]:
    """Return lines about the walls ahead, left and right, but not about walls behind an object."""
    rays = {
        "forward": view[column, :row][::-1],
        "left": view[:column, row][::-1],
        "right": view[column + 1 :, row],
    }
    lines = []
    for side, ray in rays.items():
        for distance, cell in enumerate(ray, start=1):
            kind = int(cell[0])
            if kind == _WALL:
                lines.append(f"a wall {_steps(distance)} {side}")
            if kind not in (_UNSEEN, _EMPTY):
                break
    return lines


def _name(cell: NDArray[np.integer]) -> str:
    kind, colour, state = (int(code) for code in cell)
    prefix = f"{_DOOR_STATES[state]} " if kind == _DOOR else ""
    return f"a {prefix}{_COLOURS[colour]} {_TYPES[kind]}"


def _where(right: int, ahead: int) -> str:
    parts = []
    if right:
        parts.append(f"{_steps(abs(right))} {'right' if right > 0 else 'left'}")
    if ahead:
        parts.append(f"{_steps(ahead)} forward")
    return " and ".join(parts)


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
