"""Pictures of worlds: words on plates, objects as coloured shapes."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from agentrl_envs.baba.elements import Element
from agentrl_envs.baba.world import World

_TILE = 32  # side of a cell, in pixels
_RGB = {
    "red": (214, 60, 60),
    "green": (84, 178, 84),
    "blue": (78, 120, 222),
    "purple": (156, 92, 196),
    "yellow": (226, 196, 64),
    "grey": (124, 124, 132),
    "white": (236, 236, 236),
}
_GROUND, _EDGE, _PLATE, _INK = (18, 20, 26), (58, 62, 74), (40, 44, 56), (236, 226, 196)


def draw(world: World, cell_px: int = _TILE) -> np.ndarray:
    """Return the map as RGB [height, width, 3], uint8; lower elements of a stack are visible around its top."""
    height = len(world.cells) // world.width
    picture = Image.new("RGB", (world.width * _TILE, height * _TILE), _GROUND)
    pen = ImageDraw.Draw(picture)
    for cell, stack in enumerate(world.cells):
        x, y = world.place(cell)
        for element in stack:
            _draw_element(pen, element, x * _TILE, y * _TILE)
    if cell_px != _TILE:
        picture = picture.resize((world.width * cell_px, height * cell_px), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def _draw_element(pen: ImageDraw.ImageDraw, element: Element, x: int, y: int) -> None:
    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        return x + left, y + top, x + right, y + bottom

    if element.kind == "border":
        pen.rectangle(box(0, 0, 31, 31), fill=_EDGE)
    elif element.is_text:
        pen.rectangle(box(1, 1, 30, 30), fill=_PLATE, outline=_RGB.get(element.name, _INK))
        ink = _RGB.get(element.name, _INK)
        pen.text((x + _TILE / 2, y + _TILE / 2), element.name, fill=ink, anchor="mm", font=_FONT)
    else:
        colour = _RGB[element.colour]
        if element.name == "wall":
            for left, top in ((2, 2), (17, 2), (2, 17), (17, 17)):
                pen.rectangle(box(left, top, left + 12, top + 12), fill=colour)
        elif element.name == "ball":
            pen.ellipse(box(7, 7, 24, 24), fill=colour)
        elif element.name == "key":
            pen.ellipse(box(11, 4, 20, 13), outline=colour, width=3)
            for part in ((14, 13, 17, 27), (17, 20, 22, 22), (17, 25, 21, 27)):
                pen.rectangle(box(*part), fill=colour)
        elif element.name == "door":
            pen.rectangle(box(7, 4, 24, 28), outline=colour, width=3)
            pen.ellipse(box(18, 15, 21, 18), fill=colour)
        else:  # baba: a body with two ears, legs and an eye
            for part in ((8, 4, 10, 12), (13, 4, 15, 12), (8, 22, 11, 28), (20, 22, 23, 28)):
                pen.rectangle(box(*part), fill=colour)
            pen.rounded_rectangle(box(6, 10, 26, 23), radius=5, fill=colour)
            pen.rectangle(box(9, 14, 10, 16), fill=_GROUND)


_FONT = ImageFont.load_default()
