"""Contents of cells, and the text notation of maps: one line per row, north first, cells from west to east."""

from typing import NamedTuple

NOUNS = ("baba", "wall", "ball", "key", "door")
PROPERTIES = ("you", "win", "lose", "stop", "push")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey", "white")
MAX_SIDE = 40
"""Largest width and height of a map, in cells."""

# The map notation omits the colours of baba and walls. A rule may turn them into objects whose colour matters.
_OWN_COLOURS = {"baba": "white", "wall": "grey"}
_FORMS = (
    "border",
    *(f"obj:{noun}" for noun in _OWN_COLOURS),
    *(f"obj:{noun}:<colour>" for noun in NOUNS if noun not in _OWN_COLOURS),
    "text:noun:<noun>",
    "text:is",
    "text:prop:<property>",
    "text:color:<colour>",
)


class Element(NamedTuple):
    """An object, a text block or the border.

    Args:
        kind: "border", "obj" for an object, or "noun", "is", "prop" or "color" for a text block.
        name: noun that names the object, or word on the text block.
        colour: colour of the object; empty for other elements.
    """

    kind: str
    name: str = ""
    colour: str = ""

    @property
    def is_text(self) -> bool:
        """Whether this is a text block."""
        return self.kind not in ("border", "obj")


Stack = tuple[Element, ...]
"""Elements of a cell, bottom first. Rules, moves and texts use only the last element, which is on top."""

BORDER = Element("border")
IS = Element("is", "is")


def thing(noun: str, colour: str = "") -> Element:
    """Return an object. Baba and walls have a default colour."""
    return Element("obj", noun, colour or _OWN_COLOURS[noun])


THINGS = tuple(thing(noun, colour) for noun in NOUNS for colour in COLOURS)
"""All possible objects."""

_ELEMENTS = {
    "border": BORDER,
    "text:is": IS,
    **{f"obj:{noun}": thing(noun) for noun in _OWN_COLOURS},
    **{f"obj:{noun}:{colour}": thing(noun, colour) for noun in NOUNS if noun not in _OWN_COLOURS for colour in COLOURS},
    **{f"text:noun:{noun}": Element("noun", noun) for noun in NOUNS},
    **{f"text:prop:{word}": Element("prop", word) for word in PROPERTIES},
    **{f"text:color:{colour}": Element("color", colour) for colour in COLOURS},
}
_WRITTEN = {element: written for written, element in _ELEMENTS.items()} | {
    element: f"obj:{element.name}" for element in THINGS if element.name in _OWN_COLOURS
}


def read_map(text: str) -> tuple[int, tuple[Stack, ...]]:
    """Read a map.

    Returns:
        Width of the map in cells, and the cells of the map row by row.

    Raises:
        ValueError: the text is not a valid map; the message gives the row and the cell, counted from 1.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"A map is a text with one line per row and spaces between cells, not {text!r}.")
    rows = [line.split() for line in text.strip().splitlines()]
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise ValueError(f"Row {number} of the map has {len(row)} cells, but row 1 has {width}.")
    if max(width, len(rows)) > MAX_SIDE:
        raise ValueError(f"The map has {width} x {len(rows)} cells, but at most {MAX_SIDE} x {MAX_SIDE} are possible.")
    return width, tuple(
        _read_cell(cell, f"Row {y}, cell {x} of the map")
        for y, row in enumerate(rows, 1)
        for x, cell in enumerate(row, 1)
    )


def _read_cell(cell: str, where: str) -> Stack:
    if cell == ".":
        return ()
    names = cell.split("+")
    for name in names:
        if name not in _ELEMENTS:
            raise ValueError(
                f"{where} has {name!r}, but the elements are {', '.join(_FORMS)} with the nouns {', '.join(NOUNS)}, "
                f"the properties {', '.join(PROPERTIES)} and the colours {', '.join(COLOURS)}; an empty cell is a dot."
            )
    if "border" in names and len(names) > 1:
        raise ValueError(f"{where} is {cell!r}, but a border cell has no other element.")
    return tuple(_ELEMENTS[name] for name in names)


def write_map(width: int, cells: tuple[Stack, ...]) -> str:
    """Return cells in the notation that :func:`read_map` reads."""
    written = ["+".join(_WRITTEN[element] for element in stack) or "." for stack in cells]
    return "\n".join(" ".join(written[start : start + width]) for start in range(0, len(written), width))
