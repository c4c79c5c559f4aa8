"""Boxes of a picture: correction of an agent's coordinates, and views of boxes; all pure functions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from agentrl_envs.tags import CallError

Box = tuple[int, int, int, int]
"""Left, top, right and bottom of a box, in pixels of the picture; right and bottom are exclusive."""

_AROUND = (128, 128, 128)  # colour of the margins of a view that is not square


def sound_box(
    said: object, scale: float | tuple[float, float], size: tuple[int, int], min_side: int, max_ratio: float
) -> Box:
    """Convert the four coordinates in a reply to a box of the picture.

    The box is clamped to the picture and rounded to whole pixels. A side shorter than `min_side` is enlarged around the
    centre, and the box is moved back into the picture. Then the aspect ratio of the box is checked.

    Args:
        said: left, top, right and bottom of the box, as in the reply.
        scale: pixels of the picture per unit of the coordinates; or two such values, for x and y.
        size: width and height of the picture in pixels.
        min_side: smallest side of a box in pixels.
        max_ratio: largest ratio of the longer to the shorter side.

    Raises:
        CallError: the coordinates are not a box of the picture.
    """
    if not (isinstance(said, Sequence) and len(said) == 4 and all(_finite(number) for number in said)):
        raise CallError("A box is a list of four finite numbers: left, top, right, bottom.")
    low, high = [], []
    units = scale if isinstance(scale, tuple) else (scale, scale)
    for axis, (most, unit) in enumerate(zip(size, units, strict=True)):
        begin, end = (min(max(float(said[place]) * unit, 0.0), float(most)) for place in (axis, axis + 2))
        if begin >= end:
            raise CallError(
                "Within the picture, a box must have its left before its right and its top above its bottom."
            )
        first, last = round(begin), round(end)
        side = min(max(last - first, min_side), most)
        first = min(max(first - (side - (last - first)) // 2, 0), most - side)
        low.append(first)
        high.append(first + side)
    sides = high[0] - low[0], high[1] - low[1]
    if max(sides) > max_ratio * min(sides):
        raise CallError(f"One side of a box may be at most {max_ratio:g} times as long as the other.")
    return low[0], low[1], high[0], high[1]


def _finite(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return abs(number) <= 1e9  # this comparison is false for NaN, too


def overlap(one: Box, other: Box) -> float:
    """Return the intersection over union of two boxes."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(wide, 0) * max(high, 0)
    return shared / (_area(one) + _area(other) - shared)


def _area(box: Box) -> int:
    return (box[2] - box[0]) * (box[3] - box[1])


def holds(box: Box, inner: Box) -> bool:
    """Return whether the box `box` contains the whole box `inner`."""
    return box[0] <= inner[0] and box[1] <= inner[1] and box[2] >= inner[2] and box[3] >= inner[3]


def view(picture: Image.Image, box: Box, detail: int, side: int) -> NDArray[np.uint8]:
    """Return the part of a picture in a box as a square image.

    The part is scaled to `detail` pixels on its longer side and then to `side` pixels, so that a larger image has no
    more detail. The rest of the square is grey.

    Args:
        picture: original picture.
        box: box of the part.
        detail: resolution of the part, in pixels on its longer side.
        side: side of the square in pixels, at least `detail`.
    """
    wide, high = box[2] - box[0], box[3] - box[1]
    longer = max(wide, high)

    def sides(most: int) -> tuple[int, int]:
        return max(round(wide * most / longer), 1), max(round(high * most / longer), 1)

    part = picture.crop(box)
    if part.size != sides(detail):
        part = part.resize(sides(detail), Image.Resampling.BICUBIC if longer < detail else Image.Resampling.BOX)
    if side != detail:
        part = part.resize(sides(side), Image.Resampling.BICUBIC)
    square = Image.new("RGB", (side, side), _AROUND)
    square.paste(part, ((side - part.width) // 2, (side - part.height) // 2))
    return np.asarray(square)
