"""Pictures of small grids: each cell is a stack of layers, which Pillow paints in units of the cell's side."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

_FINER = 8  # factor by which cells are painted larger and then scaled down, for smooth edges

_ICE, _ICE_LINE, _DEEP = (219, 237, 250), (170, 205, 232), (23, 32, 52)
_FLOOR, _FLOOR_LINE, _WALL, _MORTAR = (240, 230, 214), (214, 200, 178), (92, 104, 120), (62, 72, 86)
_GREEN, _DARK_GREEN, _RED, _SKIN, _YELLOW = (34, 168, 92), (16, 108, 56), (206, 44, 44), (250, 214, 176), (246, 190, 0)
_WOOD, _DARK_WOOD, _WHITE = (168, 104, 44), (108, 62, 22), (255, 255, 255)


class _Pen:
    """Drawing functions for a square whose sides have length 1."""

    def __init__(self, picture: Image.Image) -> None:
        self._pen = ImageDraw.Draw(picture)
        self._side = picture.width

    def box(self, left: float, top: float, right: float, bottom: float, colour: Colour, round: float = 0.0) -> None:
        self._pen.rounded_rectangle(self._at(left, top, right, bottom), round * self._side, fill=colour)

    def oval(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        self._pen.ellipse(self._at(left, top, right, bottom), fill=colour)

    def shape(self, corners: Sequence[tuple[float, float]], colour: Colour) -> None:
        self._pen.polygon([(x * self._side, y * self._side) for x, y in corners], fill=colour)

    def _at(self, left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        return left * self._side, top * self._side, right * self._side - 1, bottom * self._side - 1


def checked_cell_px(cell_px: int) -> int:
    """Check and return the side of a cell in pixels.

    Raises:
        ValueError: `cell_px` is not an integer from 8 to 128.
    """
    if isinstance(cell_px, bool) or not (isinstance(cell_px, int) and 8 <= cell_px <= 128):
        raise ValueError(f"cell_px must be a whole number of pixels from 8 to 128, not {cell_px!r}.")
    return cell_px


def draw_grid(rows: Sequence[Sequence[str]], looks: Mapping[str, tuple[str, ...]], cell_px: int) -> NDArray[np.uint8]:
    """Return a picture of a grid as RGB [height, width, 3].

    Args:
        rows: symbols of the cells, top row first.
        looks: symbol of a cell -> layers of the cell, bottom first, as keys of `LAYERS`.
        cell_px: side of a cell in pixels.
    """
    return np.concatenate([np.concatenate([_cell(looks[symbol], cell_px) for symbol in row], 1) for row in rows])


@cache
def _cell(layers: tuple[str, ...], cell_px: int) -> NDArray[np.uint8]:
    picture = Image.new("RGB", (cell_px * _FINER, cell_px * _FINER))
    for layer in layers:
        LAYERS[layer](_Pen(picture))
    return np.asarray(picture.reduce(_FINER))


def _ground(colour: Colour, line: Colour) -> Callable[[_Pen], None]:
    def paint(pen: _Pen) -> None:
        pen.box(0, 0, 1, 1, line)
        pen.box(0.03, 0.03, 0.97, 0.97, colour)

    return paint


def _wall(pen: _Pen) -> None:
    pen.box(0, 0, 1, 1, _MORTAR)
    for top, cuts in ((0.0, (0.0, 0.5, 1.0)), (0.34, (0.0, 0.25, 0.75, 1.0)), (0.68, (0.0, 0.5, 1.0))):
        for left, right in pairwise(cuts):
            pen.box(left + 0.03, top + 0.03, right - 0.03, top + 0.29, _WALL)


def _hole(pen: _Pen) -> None:
    pen.oval(0.08, 0.08, 0.92, 0.92, _ICE_LINE)
    pen.oval(0.12, 0.12, 0.88, 0.88, _DEEP)


def _goal(pen: _Pen) -> None:
    pen.box(0.06, 0.06, 0.94, 0.94, _GREEN)
    pen.box(0.30, 0.16, 0.38, 0.86, _WHITE)
    pen.shape(((0.38, 0.16), (0.80, 0.33), (0.38, 0.52)), _WHITE)


def _target(pen: _Pen) -> None:
    pen.shape(((0.5, 0.06), (0.94, 0.5), (0.5, 0.94), (0.06, 0.5)), _YELLOW)
    pen.shape(((0.5, 0.26), (0.74, 0.5), (0.5, 0.74), (0.26, 0.5)), _FLOOR)


def _crate(colour: Colour, dark: Colour) -> Callable[[_Pen], None]:
    def paint(pen: _Pen) -> None:
        pen.box(0.14, 0.14, 0.86, 0.86, dark)
        pen.box(0.23, 0.23, 0.77, 0.77, colour)
        pen.shape(((0.23, 0.23), (0.33, 0.23), (0.77, 0.67), (0.77, 0.77), (0.67, 0.77), (0.23, 0.33)), dark)

    return paint


def _player(pen: _Pen) -> None:
    pen.box(0.20, 0.44, 0.80, 0.92, _RED, round=0.16)
    pen.oval(0.28, 0.06, 0.72, 0.50, _DEEP)
    pen.oval(0.32, 0.10, 0.68, 0.46, _SKIN)


def _sunk(pen: _Pen) -> None:
    pen.oval(0.28, 0.34, 0.72, 0.78, _RED)
    pen.oval(0.35, 0.41, 0.65, 0.71, _SKIN)


LAYERS: Mapping[str, Callable[[_Pen], None]] = {
    "ice": _ground(_ICE, _ICE_LINE),
    "floor": _ground(_FLOOR, _FLOOR_LINE),
    "wall": _wall,
    "hole": _hole,
    "goal": _goal,
    "target": _target,
    "crate": _crate(_WOOD, _DARK_WOOD),
    "crate in place": _crate(_GREEN, _DARK_GREEN),
    "player": _player,
    "player in a hole": _sunk,
}
"""Name of a layer -> function that paints the layer."""
