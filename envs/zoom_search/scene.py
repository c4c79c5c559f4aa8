"""Scenes: large pictures full of shapes, with a question about one of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from agentrl_envs.zoom_search.boxes import Box

Level = Literal["colour", "number", "two_steps"]
Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (214, 32, 38),
    "orange": (245, 132, 20),
    "yellow": (246, 218, 40),
    "green": (32, 150, 62),
    "blue": (36, 78, 214),
    "purple": (126, 44, 176),
    "pink": (250, 160, 204),
    "white": (252, 252, 252),
}
NUMBERS = tuple("0123456789")
MARKS = ("star", "circle", "triangle", "square", "cross", "ring")

_CELL = 96  # side of a cell in pixels; a cell has at most one plate
_CALM: tuple[Colour, ...] = (
    (64, 122, 168),
    (70, 148, 136),
    (96, 104, 118),
    (112, 132, 84),
    (88, 92, 158),
    (134, 120, 98),
)
_FRAMES: tuple[Colour, ...] = ((28, 62, 190), (20, 120, 60), (24, 24, 28), (110, 40, 150))
_RED: Colour = (226, 18, 24)
_BLACK: Colour = (16, 16, 18)
_DOT = 2  # side of a numeral's dot, in pixels
_SPECKS = 0.2  # largest share of inked dots around a numeral
_GRAIN = 26.0  # standard deviation of the shade of a dot
_NUMERALS = (  # each numeral has 5 by 7 dots
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)


@dataclass(frozen=True)
class Scene:
    """A picture and a question about it.

    Args:
        picture: original picture; generated pictures are square.
        targets: boxes of the regions to find.
        mark: mark of the target, at level `two_steps`.
        answers: right answers, in lower case.
        question: question about a user's picture; empty for a generated picture.
    """

    picture: Image.Image
    targets: tuple[Box, ...]
    mark: str
    answers: tuple[str, ...]
    question: str = ""


def draw_scene(random: np.random.Generator, level: Level, side: int) -> Scene:
    """Draw a scene.

    Args:
        random: random generator.
        level: "colour": a large square with a black frame, whose colour is the answer; "number": plates with numerals,
            one plate with a red frame; "two_steps": plates with red frames, each with a mark and a numeral.
        side: side of the picture in pixels.
    """
    coarse = random.integers(196, 244, size=(8, 8, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((side, side), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(picture)
    for _ in range(10 + side * side // 40_000):
        _distractor(pen, random, side)
    count = 1 if level == "colour" else 6
    across = side // _CELL
    boxes = []
    for cell in random.choice(across * across, size=count, replace=False):
        wide, high = {"colour": (56, 56), "number": (44, 44), "two_steps": (64, 44)}[level]
        left = int(cell) % across * _CELL + int(random.integers(4, _CELL - wide - 3))
        top = int(cell) // across * _CELL + int(random.integers(4, _CELL - high - 3))
        boxes.append((left, top, left + wide, top + high))
    target = boxes[0]
    if level == "colour":
        name = str(random.choice(list(COLOURS)))
        pen.rectangle(_drawn(target), fill=_BLACK)
        pen.rectangle(_drawn(_inner(target, 8)), fill=COLOURS[name])
        return Scene(picture, (target,), "", (name,))
    marks = [MARKS[int(number)] for number in random.permutation(len(MARKS))]
    numbers = [int(number) for number in random.integers(0, 10, size=count)]
    for place, (box, mark, number) in enumerate(zip(boxes, marks, numbers, strict=True)):
        frame = _RED if level == "two_steps" or place == 0 else _FRAMES[int(random.integers(len(_FRAMES)))]
        _plate(picture, random, box, frame, number, mark if level == "two_steps" else "")
    return Scene(picture, (target,), marks[0] if level == "two_steps" else "", (NUMBERS[numbers[0]],))


def _distractor(pen: ImageDraw.ImageDraw, random: np.random.Generator, side: int) -> None:
    x, y = (int(place) for place in random.integers(0, side, size=2))
    radius = int(random.integers(8, 56))
    colour = _CALM[int(random.integers(len(_CALM)))]
    kind = int(random.integers(3))
    if kind == 0:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif kind == 1:
        pen.polygon(_corners(x, y, radius, 3, float(random.uniform(0, 2))), fill=colour)
    else:
        pen.polygon(_corners(x, y, radius, 5, float(random.uniform(0, 2))), outline=colour, width=6)


def _plate(picture: Image.Image, random: np.random.Generator, box: Box, frame: Colour, number: int, mark: str) -> None:
    """Draw a framed plate. Grain and specks prevent recognizing the numeral by its mean shade."""
    inner = _inner(box, 6)
    wide, high = (inner[2] - inner[0]) // _DOT, (inner[3] - inner[1]) // _DOT
    left = wide - 8 if mark else wide // 2 - 3 + int(random.integers(-1, 3))
    top = high // 2 - 4 + int(random.integers(-2, 4))
    inked = random.random((high, wide)) < random.uniform(0, _SPECKS)
    inked[:, : wide - 10 if mark else 0] = False
    inked[top - 1 : top + 8, left - 1 : left + 6] = False
    inked[top : top + 7, left : left + 5] = [[dot == "1" for dot in row] for row in _NUMERALS[number].split()]
    light, dark = random.uniform(180, 235), random.uniform(20, 60)
    plate, ink = (light, dark) if random.random() < 0.5 else (dark, light)
    shades = np.where(inked, ink, plate) + random.normal(0, _GRAIN, (high, wide))
    paper = Image.fromarray(shades.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    pen.rectangle(_drawn(box), fill=frame)
    picture.paste(paper.resize((wide * _DOT, high * _DOT), Image.Resampling.NEAREST), inner[:2])
    if mark:
        _MARKS[mark](pen, box[0] + 20, (box[1] + box[3]) // 2, (round(ink),) * 3)


def _drawn(box: Box) -> Box:
    """Return a box with inclusive right and bottom, as Pillow draws boxes."""
    return box[0], box[1], box[2] - 1, box[3] - 1


def _inner(box: Box, edge: int) -> Box:
    return box[0] + edge, box[1] + edge, box[2] - edge, box[3] - edge


def _corners(x: int, y: int, radius: float, count: int, turned: float, inner: float = 1.0) -> list[tuple[float, float]]:
    """Return corners on a circle, from the top; if `inner` is below 1, every second corner is nearer to the centre."""
    angles = [math.pi * (2 * number / count - 0.5 + turned) for number in range(count)]
    radii = [radius * (inner if number % 2 else 1.0) for number in range(count)]
    return [(x + far * math.cos(angle), y + far * math.sin(angle)) for far, angle in zip(radii, angles, strict=True)]


def _star(pen: ImageDraw.ImageDraw, x: int, y: int, ink: Colour) -> None:
    pen.polygon(_corners(x, y, 12, 10, 0.0, inner=0.42), fill=ink)


def _circle(pen: ImageDraw.ImageDraw, x: int, y: int, ink: Colour) -> None:
    pen.ellipse((x - 8, y - 8, x + 8, y + 8), fill=ink)


def _triangle(pen: ImageDraw.ImageDraw, x: int, y: int, ink: Colour) -> None:
    pen.polygon(_corners(x, y + 2, 11, 3, 0.0), fill=ink)


def _square(pen: ImageDraw.ImageDraw, x: int, y: int, ink: Colour) -> None:
    pen.rectangle((x - 8, y - 8, x + 8, y + 8), fill=ink)


def _cross(pen: ImageDraw.ImageDraw, x: int, y: int, ink: Colour) -> None:
    pen.rectangle((x - 9, y - 3, x + 9, y + 3), fill=ink)
    pen.rectangle((x - 3, y - 9, x + 3, y + 9), fill=ink)


def _ring(pen: ImageDraw.ImageDraw, x: int, y: int, ink: Colour) -> None:
    pen.ellipse((x - 9, y - 9, x + 9, y + 9), outline=ink, width=4)


_Painter = Callable[[ImageDraw.ImageDraw, int, int, Colour], None]
_PAINTERS: Sequence[_Painter] = (_star, _circle, _triangle, _square, _cross, _ring)
_MARKS: dict[str, _Painter] = dict(zip(MARKS, _PAINTERS, strict=True))
