"""Functions that read tasks with pictures from files or from the hub, check the tasks and scale the pictures."""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL import Image

from agentrl_envs.geometry.env import PictureTask
from agentrl_envs.picture_space import of_8_bits

QUESTION, PICTURE = ("question", "problem"), ("image", "images")  # column names; the first existing name is used
_LETTERS = "ABCDEFGH"
_LEAST_PX, _MOST_RATIO = 32, 100


def read_rows(source: str, split: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a data set.

    Args:
        source: folder with `<split>.jsonl` or `<split>.parquet`, one such file, or id of a data set for the package
            `datasets`.
        split: split of the data set.

    Raises:
        ValueError: the data set cannot be read; the message names the missing part.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = [path / f"{split}.{kind}" for kind in ("jsonl", "parquet") if (path / f"{split}.{kind}").is_file()]
        if not found:
            raise ValueError(f"The folder {source!r} has neither {split}.jsonl nor {split}.parquet.")
        path = found[0]
    if path.suffix == ".jsonl" and path.is_file():
        return list(_lines(path))
    if path.suffix == ".parquet" and path.is_file():
        table = _package("pyarrow.parquet").read_table(path)
        return [{**row, _FOLDER: str(path.parent)} for row in table.to_pylist()]
    if path.suffix in (".jsonl", ".parquet") or source.startswith((".", "/", "~")):
        raise ValueError(f"The folder or file {source!r} does not exist.")
    try:
        rows: Sequence[Mapping[str, Any]] = _package("datasets").load_dataset(source, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"The data set {source!r} ({split}) cannot be loaded: {error}") from error
    return rows


_FOLDER = "folder of the file"  # key that is added to rows from a file


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}.") from None
    for count, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Line {count} of {path} is not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise ValueError(f"Line {count} of {path} is not a JSON object.")
        yield {**row, _FOLDER: str(path.parent)}


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        raise ValueError(f"{package} is not installed; install it with pip install {package}.") from error


def read_row(row: Mapping[str, Any], name: str, most_px: int) -> tuple[str, str, Image.Image]:
    """Return question, answer and picture of a row.

    Args:
        row: row with a question, an answer and an image.
        name: name of the row, for error messages.
        most_px: largest side of the picture in pixels.

    Raises:
        ValueError: a column is missing, or its value cannot be used.
    """
    question = next((row[key] for key in QUESTION if row.get(key)), None)
    picture = next((row[key] for key in PICTURE if row.get(key)), None)
    answer = row.get("answer")
    for key, value in (("question", question), ("answer", answer), ("image", picture)):
        if value is None or value == "":
            raise ValueError(f"{name} has no {key}.")
    if isinstance(picture, list):
        if len(picture) != 1:
            raise ValueError(f"{name} has {len(picture)} images; one is expected.")
        picture = picture[0]
    asked = str(question).replace("<image>", "").strip()
    return asked, str(answer).strip(), _open(picture, row, name, most_px)


def read_task(row: Mapping[str, Any], name: str, most_px: int) -> PictureTask:
    """Return the task of a row, with the choices if the row has choices; see :func:`read_row`.

    Raises:
        ValueError: a column is missing, or its value cannot be used.
    """
    listed = row.get("choices")
    if not isinstance(listed, list | tuple | None):
        raise ValueError(f"{name} has the choices {listed!r}, which are not a list.")
    choices = tuple(str(choice) for choice in listed or ())
    asked, right, picture = read_row(row, name, most_px)
    if choices:
        if len(choices) > len(_LETTERS):
            raise ValueError(f"{name} has {len(choices)} choices; at most {len(_LETTERS)} can be named.")
        right = _LETTERS[choices.index(right)] if right in choices else right.upper()
        if right not in _LETTERS[: len(choices)]:
            raise ValueError(
                f"{name} has the answer {row['answer']!r}, which is neither a choice nor the letter of one."
            )
    return PictureTask(asked, right, picture, choices)


def _open(picture: Any, row: Mapping[str, Any], name: str, most_px: int) -> Image.Image:
    if isinstance(picture, Mapping):  # the package `datasets` writes images to parquet as dictionaries
        picture = picture.get("bytes") or picture.get("path")
    try:
        if isinstance(picture, Image.Image):
            return fit(picture, most_px)
        source = io.BytesIO(picture) if isinstance(picture, bytes) else Path(row.get(_FOLDER, ".")) / str(picture)
        with Image.open(source) as opened:
            return fit(opened, most_px)
    except (OSError, Image.DecompressionBombError, SyntaxError, ValueError) as error:
        raise ValueError(f"The image of {name} cannot be read: {error}.") from error


def fit(picture: Image.Image, most_px: int) -> Image.Image:
    """Return a picture as RGB whose longest side has at most `most_px` pixels.

    A side with less than 32 pixels, or less than a hundredth of the other side, is extended with white.
    """
    plain = of_8_bits(picture).convert("RGBA")
    flat = Image.new("RGBA", plain.size, "white")
    flat.alpha_composite(plain)
    shown = flat.convert("RGB")
    shown.thumbnail((most_px, most_px), Image.Resampling.LANCZOS)
    least = max(_LEAST_PX, math.ceil(max(shown.size) / _MOST_RATIO))
    if min(shown.size) >= least:
        return shown
    padded = Image.new("RGB", (max(shown.width, least), max(shown.height, least)), "white")
    padded.paste(shown, ((padded.width - shown.width) // 2, (padded.height - shown.height) // 2))
    return padded
