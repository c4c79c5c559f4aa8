"""Pictures of small grids: one square per cell, in colours of its symbol."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]

_CELL = 24  # pixels
_EDGE = 5  # pixels between the border of a cell and the thing in it


def draw_grid(rows: Sequence[Sequence[str]], colours: Mapping[str, tuple[Colour, Colour | None]]) -> NDArray[np.uint8]:
    """Return a picture of a grid as RGB [height, width, 3].

    Args:
        rows: symbols, from the top row down.
        colours: symbol -> colours of its ground and of the thing on it, if there is one.
    """
    picture = np.zeros((len(rows) * _CELL, len(rows[0]) * _CELL, 3), dtype=np.uint8)
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            cell = picture[y * _CELL : (y + 1) * _CELL, x * _CELL : (x + 1) * _CELL]
            ground, thing = colours[symbol]
            cell[:-1, :-1] = ground  # what is left dark is the line between cells
            if thing is not None:
                cell[_EDGE : -_EDGE - 1, _EDGE : -_EDGE - 1] = thing
    return picture
