"""Images among packed tokens: which tokens are theirs, what the tower reads of them, and positions in three rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_agentrl.models.image_reader import FamilyReader
from lightning_agentrl.models.integers import integers
from lightning_agentrl.types.model_input import ImageChunk
from lightning_agentrl.types.transfer import to_device


@dataclass(frozen=True)
class PackedImages:
    """The images of one forward pass: each different one is read once, wherever and however often it stands."""

    patches: dict[str, Tensor]  # of the different images: arguments of the model's ``get_image_features``
    places: Tensor  # [M] int64, index into the flat ids of each token of an image, ascending
    tokens: Tensor  # [M] int64, which of the tokens of the different images it is


@dataclass(frozen=True)
class Tokens:
    """What a model reads at N places."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, or [3, N] where images have rows and columns
    images: PackedImages | None


Found = list[tuple[int, ImageChunk]]  # first place, and the image, ascending


def find_tokens(
    keys: Sequence[int],
    positions_N: Tensor,
    ends_N: Tensor,
    inputs: Iterable[Sequence[ImageChunk]],
    reader: FamilyReader | None,
    feed_tower: bool = False,
) -> Tokens:
    """Return what a model reads for keys.

    Args:
        keys: of N tokens, in which images are whole.
        positions_N: of the tokens, as if images were text.
        ends_N: index behind the last token that sees each; all from it to there do.
        inputs: images that can be there.
        reader: of the model's images; None: it reads text only.
        feed_tower: give the tower a blank image if there is none, so that all its weights have gradients.

    Raises:
        ValueError: the pixels of an image are missing, or not of this model.
    """
    device = positions_N.device
    if reader is None:
        return Tokens(integers(keys, device), positions_N, None)
    ids, found = _find_images(keys, {image.keys[0]: image for images in inputs for image in images})
    if reader.rotary:
        positions_N = rotary_positions(positions_N.cpu(), ends_N.cpu(), found, reader).to(device)
    return Tokens(integers(ids, device), positions_N, _packed(found, reader, device, feed_tower))


def _find_images(keys: Sequence[int], images: dict[int, ImageChunk]) -> tuple[list[int], Found]:
    ids, found, place = list(keys), Found(), 0
    while images and place < len(ids):
        image = images.get(ids[place])
        if image is None:
            place += 1
        else:
            ids[place : place + image.tokens] = image.ids
            found.append((place, image))
            place += image.tokens
    return ids, found


def _packed(found: Found, reader: FamilyReader, device: torch.device, feed_tower: bool) -> PackedImages | None:
    different = {image.digest: image for _, image in found}
    if not different and feed_tower:
        different = {"": reader.blank()}
    if not different:
        return None
    first, start = dict[str, int](), 0
    for digest, image in different.items():
        reader.grid(image)
        first[digest], start = start, start + image.tokens
    places = [place + k for place, image in found for k in range(image.tokens)]
    tokens = [first[image.digest] + k for _, image in found for k in range(image.tokens)]
    return PackedImages(
        {name: to_device(x, device) for name, x in reader.patches(list(different.values())).items()},
        integers(places, device),
        integers(tokens, device),
    )


def rotary_positions(positions_N: Tensor, ends_N: Tensor, found: Found, reader: FamilyReader) -> Tensor:
    """Return positions [3, N] in time, rows and columns.

    A text token has one position in all three. An image begins where the text before it stops, its tokens lie in rows
    and columns from there, and what follows goes on behind the longer side.

    Args:
        positions_N: places of the tokens in their rows, on the CPU.
        ends_N: index behind the last token that sees each, on the CPU: all from it to there do.
        found: images and their places.
        reader: of the model.
    """
    spread = positions_N.repeat(3, 1)
    for place, image in found:
        rows, columns = reader.grid(image)
        own, after = slice(place, place + image.tokens), slice(place + image.tokens, int(ends_N[place]))
        row, column = torch.arange(rows), torch.arange(columns)
        lattice = torch.stack([row.new_zeros(image.tokens), row.repeat_interleave(columns), column.repeat(rows)])
        spread[:, own] = spread[0, place] + lattice
        spread[:, after] += max(rows, columns) - image.tokens
    return spread
