"""Pictures in observations of OpenEnv, in the forms that servers use; the protocol defines no form."""

import binascii
import io
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from agentrl_envs.picture_space import of_8_bits

FIELD = "images"
"""The field in which `agentrl serve-env` puts pictures."""

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")  # Pillow's other formats may start a program or raise any error
_PLACE = {"type": "image"}  # placeholder of a picture in a message


def read_images(given: Any) -> tuple[NDArray[np.uint8], ...]:
    """Return pictures as RGB [height, width, 3].

    Args:
        given: one picture or a list of pictures, each a file (PNG, JPEG, GIF, WebP, BMP) in base64, with or without the
            prefix of a data URL, or an array of rows of pixels [red, green, blue]. None means no pictures.

    Raises:
        ValueError: the pictures have none of these forms.
    """
    if given is None:
        return ()
    if isinstance(given, str):
        return (_from_file(given),)
    if not isinstance(given, list):
        raise ValueError(f"it is of type {type(given).__name__}")
    if all(isinstance(one, str) for one in given):
        return tuple(map(_from_file, given))
    try:
        pixels = np.array(given)
    except ValueError:  # the pictures have different sizes
        return tuple(_from_rows(np.array(one)) for one in given)
    return (_from_rows(pixels),) if pixels.ndim < 4 else tuple(map(_from_rows, pixels))


def with_images(messages: Any, images: Sequence[NDArray[np.uint8]]) -> list[Any]:
    """Return an environment's own messages with its pictures in place of the placeholders, in order.

    Raises:
        ValueError: `messages` is not a list of messages, or the counts of placeholders and pictures differ.
    """
    left = list(images)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("the messages in the metadata are not a list of objects")
    filled = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [{**item, "image": left.pop(0)} if item == _PLACE and left else item for item in content]
        filled.append({**message, "content": content})
    if left:
        raise ValueError(f"the messages in the metadata have no place for {len(left)} of them")
    return filled


def _from_rows(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    whole = pixels.dtype.kind in "iu" and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size > 0
    if not whole or pixels.min() < 0 or pixels.max() > 255:
        raise ValueError(f"a picture in it is an array {list(pixels.shape)}, not of [height, width, 3] and 0 to 255")
    return pixels.astype(np.uint8)


def _from_file(text: str) -> NDArray[np.uint8]:
    start, comma, rest = text.partition(",")
    try:
        file = b64decode(rest if comma and start.startswith("data:") else text, validate=True)
        with Image.open(io.BytesIO(file), formats=_FORMATS) as picture:
            return np.array(of_8_bits(picture).convert("RGB"))
    except (binascii.Error, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a picture in it cannot be read: {type(error).__name__}") from error
