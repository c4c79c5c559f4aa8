"""A user's own pictures: rows with a question, an answer, a picture, and optionally boxes of the regions to find."""

from collections.abc import Mapping
from typing import Any

from agentrl_envs.geometry.tasks import read_row
from agentrl_envs.zoom_search.boxes import Box
from agentrl_envs.zoom_search.scene import Scene

_MOST_PX = 65_500  # largest side of a picture; pictures are not scaled down, so that boxes stay valid


def read_scene(row: Mapping[str, Any], name: str) -> Scene:
    """Return the scene of a row: its picture at full size, and its question and answers.

    Args:
        row: row with `question`, `answer` (or a list of right answers), `image` and optionally `boxes`: regions to
            find, each as left, top, right and bottom in pixels of the picture. A single region may be in `box`.
        name: name of the row, for error messages.

    Raises:
        ValueError: a column is missing, or its value cannot be used.
    """
    answers = row.get("answer")
    answers = answers if isinstance(answers, list | tuple) else [answers]
    question, _, picture = read_row({**row, "answer": answers[0] if answers else None}, name, _MOST_PX)
    boxes = row.get("boxes") or ([row["box"]] if row.get("box") else [])
    targets = tuple(_box(box, picture.size, name) for box in boxes)
    return Scene(
        picture, targets, "", tuple(str(answer).strip().casefold().rstrip(".") for answer in answers), question
    )


def _box(said: object, size: tuple[int, int], name: str) -> Box:
    if isinstance(said, list | tuple) and len(said) == 4 and all(isinstance(one, int | float) for one in said):
        left, top, right, bottom = (round(one) for one in said)
        if 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]:
            return left, top, right, bottom
    raise ValueError(
        f"{name} has the box {said!r}, which is not a part of its picture of {size[0]} x {size[1]} pixels; a box is "
        "left, top, right and bottom."
    )
