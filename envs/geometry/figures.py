"""Figures with labels, drawn to scale, and questions about the figures whose answers are numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]

_INK, _PAPER, _FILL = (24, 28, 36), (255, 255, 255), (226, 236, 248)
_FONT = ImageFont.load_default()
_MARGIN = 0.2  # share of a picture's side that is kept free for labels
_LABEL = 2  # size of a label relative to the font


@dataclass(frozen=True)
class Figure:
    """A figure in the plane, with labels, a question and its answer.

    Args:
        corners: corners of the outline in order; for a circle, its centre and a point on the circle.
        labels: texts, each with a point; a text is beside its point, on the side away from the figure's centre.
        question: text of the question, without the given numbers, which only the picture shows.
        answer: right answer.
        lines: further lines, which are drawn thin.
        squares: right angles, each as the corner with the angle and the two neighbouring corners.
    """

    corners: Sequence[Point]
    labels: Sequence[tuple[str, Point]]
    question: str
    answer: float
    lines: Sequence[tuple[Point, Point]] = ()
    squares: Sequence[tuple[Point, Point, Point]] = ()


def triangle_angle(random: np.random.Generator) -> Figure:
    """Ask for an angle of a triangle, given the other two."""
    first, second = (int(angle) for angle in random.integers(30, 76, size=2))
    a, b = (0.0, 0.0), (1.0, 0.0)
    far = math.sin(math.radians(second)) / math.sin(math.radians(first + second))
    c = (far * math.cos(math.radians(first)), far * math.sin(math.radians(first)))
    labels = [(f"A: {first}\u00b0", a), (f"B: {second}\u00b0", b), ("C: ?", c)]
    return Figure((a, b, c), labels, "How many degrees has the angle at C?", 180 - first - second)


def hypotenuse(random: np.random.Generator) -> Figure:
    """Ask for the hypotenuse of a right triangle, given its legs."""
    width, height = (int(side) for side in random.integers(3, 13, size=2))
    return _right_triangle(width, height, (str(width), str(height), "x"), math.hypot(width, height))


def leg(random: np.random.Generator) -> Figure:
    """Ask for a leg of a right triangle, given the other leg and the hypotenuse."""
    width, height = (int(side) for side in random.integers(4, 13, size=2))
    long = round(math.hypot(width, height), 1)
    return _right_triangle(width, height, (str(width), "x", f"{long:g}"), math.sqrt(long**2 - width**2))


def _right_triangle(width: float, height: float, names: tuple[str, str, str], answer: float) -> Figure:
    a, b, c = (0.0, 0.0), (float(width), 0.0), (0.0, float(height))
    labels = [(names[0], _middle(a, b)), (names[1], _middle(a, c)), (names[2], _middle(b, c))]
    return Figure((a, b, c), labels, "How long is the side x?", answer, squares=[(a, b, c)])


def rectangle_area(random: np.random.Generator) -> Figure:
    """Ask for the area of a rectangle, given its sides."""
    return _rectangle(random, "What is the area of the rectangle?", lambda width, height: width * height)


def rectangle_perimeter(random: np.random.Generator) -> Figure:
    """Ask for the perimeter of a rectangle, given its sides."""
    return _rectangle(
        random, "How long is the way once round the rectangle?", lambda width, height: 2 * (width + height)
    )


def _rectangle(random: np.random.Generator, question: str, answer: Callable[[int, int], int]) -> Figure:
    width, height = (int(side) for side in random.integers(3, 13, size=2))
    a, b, c, d = (0.0, 0.0), (float(width), 0.0), (float(width), float(height)), (0.0, float(height))
    labels = [(str(width), _middle(a, b)), (str(height), _middle(b, c))]
    squares = [(a, b, d), (b, a, c), (c, b, d), (d, a, c)]
    return Figure((a, b, c, d), labels, question, answer(width, height), squares=squares)


def triangle_area(random: np.random.Generator) -> Figure:
    """Ask for the area of a triangle, given a side and the height on that side."""
    base, height = (int(side) for side in random.integers(4, 13, size=2))
    foot = (float(random.uniform(0.25, 0.75) * base), 0.0)
    a, b, c = (0.0, 0.0), (float(base), 0.0), (foot[0], float(height))
    labels = [(str(base), (base / 2, 0.0)), (f"h = {height}", c)]
    question = "What is the area of the triangle? The thin line h is the height."
    return Figure((a, b, c), labels, question, base * height / 2, lines=[(c, foot)], squares=[(foot, a, c)])


def circle_area(random: np.random.Generator) -> Figure:
    """Ask for the area of a circle, given its radius."""
    radius = int(random.integers(2, 13))
    middle, edge = (0.0, 0.0), (float(radius), 0.0)
    question = "What is the area of the circle? The line r goes from its middle to its edge."
    return Figure((middle, edge), [(f"r = {radius}", edge)], question, math.pi * radius**2)


KINDS: dict[str, Callable[[np.random.Generator], Figure]] = {
    kind.__name__: kind
    for kind in (triangle_angle, hypotenuse, leg, rectangle_area, rectangle_perimeter, triangle_area, circle_area)
}


def draw_figure(figure: Figure, turned: float, side: int) -> Image.Image:
    """Return a picture of a figure.

    Args:
        figure: figure to draw.
        turned: angle by which the figure is rotated, in radians.
        side: side of the square picture in pixels.
    """
    circle = len(figure.corners) == 2
    radius = math.dist(*figure.corners) if circle else 0.0
    points = [
        *figure.corners,
        *(place for _, place in figure.labels),
        *(place for line in figure.lines for place in line),
    ]
    spread = [_turn(point, turned) for point in points]
    low = [min(point[axis] for point in spread) - radius * circle for axis in (0, 1)]
    high = [max(point[axis] for point in spread) + radius * circle for axis in (0, 1)]
    if circle:
        middle = _turn(figure.corners[0], turned)
        low, high = ([part + sign * radius for part in middle] for sign in (-1, 1))
    scale = side * (1 - 2 * _MARGIN) / max(high[0] - low[0], high[1] - low[1])

    def at(point: Point) -> Point:
        x, y = _turn(point, turned)
        return side / 2 + scale * (x - (low[0] + high[0]) / 2), side / 2 - scale * (y - (low[1] + high[1]) / 2)

    picture = Image.new("RGB", (side, side), _PAPER)
    pen = ImageDraw.Draw(picture)
    thick = max(side // 90, 2)
    if circle:
        (x, y), far = at(figure.corners[0]), scale * radius
        pen.ellipse((x - far, y - far, x + far, y + far), fill=_FILL, outline=_INK, width=thick)
        pen.line((at(figure.corners[0]), at(figure.corners[1])), fill=_INK, width=thick)
        pen.ellipse((x - thick, y - thick, x + thick, y + thick), fill=_INK)
    else:
        corners = [at(corner) for corner in figure.corners]
        pen.polygon(corners, fill=_FILL)
        pen.line((*corners, corners[0], corners[1]), fill=_INK, width=thick, joint="curve")
    for begin, end in figure.lines:
        pen.line((at(begin), at(end)), fill=_INK, width=1)
    for corner, *others in figure.squares:
        _right_angle(pen, at(corner), [at(other) for other in others], side / 24)
    centre = (
        sum(at(corner)[0] for corner in figure.corners) / len(figure.corners),
        sum(at(corner)[1] for corner in figure.corners) / len(figure.corners),
    )
    for text, place in figure.labels:
        _label(picture, text, at(place), at(figure.corners[0]) if circle else centre)
    return picture


def _label(picture: Image.Image, text: str, place: Point, centre: Point) -> None:
    """Write a text beside a place, on the side away from the centre, within the picture."""
    left, top, right, bottom = (int(side) for side in _FONT.getbbox(text))
    mask = Image.new("L", (right - left + 2, bottom - top + 2))
    ImageDraw.Draw(mask).text((1 - left, 1 - top), text, fill=255, font=_FONT)
    mask = mask.resize((mask.width * _LABEL, mask.height * _LABEL), Image.Resampling.BICUBIC)
    far = math.dist(place, centre) or 1.0
    away = [(place[axis] - centre[axis]) / far for axis in (0, 1)]
    x, y = (
        round(min(max(place[axis] + away[axis] * (size / 2 + 6) - size / 2, 0), picture.size[axis] - size))
        for axis, size in enumerate(mask.size)
    )
    picture.paste(_INK, (x, y), mask)


def _right_angle(pen: ImageDraw.ImageDraw, corner: Point, others: Sequence[Point], size: float) -> None:
    steps = [
        (
            size * (other[0] - corner[0]) / math.dist(other, corner),
            size * (other[1] - corner[1]) / math.dist(other, corner),
        )
        for other in others
    ]
    first, second = ((corner[0] + step[0], corner[1] + step[1]) for step in steps)
    across = corner[0] + steps[0][0] + steps[1][0], corner[1] + steps[0][1] + steps[1][1]
    pen.line((first, across, second), fill=_INK, width=1)


def _middle(one: Point, other: Point) -> Point:
    return (one[0] + other[0]) / 2, (one[1] + other[1]) / 2


def _turn(point: Point, angle: float) -> Point:
    sine, cosine = math.sin(angle), math.cos(angle)
    return cosine * point[0] - sine * point[1], sine * point[0] + cosine * point[1]
