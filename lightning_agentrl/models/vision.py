"""Images: what a model makes of them, their place among packed tokens, and the tower that reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.types.model_input import ImageChunk, ImageReader, ModelInput, TextChunk
from lightning_agentrl.types.transfer import integers, to_device

MAX_RATIO = 200  # of the longer side to the shorter one
IDEFICS3_MARK, IDEFICS3_WHOLE = "<fake_token_around_image>", "<global-img>"


class FamilyReader(ImageReader, ABC):
    """Reads images as one family of models does, with the image processor in the folder of the model.

    Pillow resizes, whatever else is installed: other libraries round differently.
    """

    rotary: ClassVar[bool] = False
    """Whether tokens have three positions each: an image lies in time, rows and columns."""

    def __init__(self, config: PreTrainedConfig, folder: str) -> None:
        self.placeholder = int(cast(Any, config).image_token_id)
        self.folder = folder
        self.processor = cast(Any, AutoImageProcessor.from_pretrained(folder, backend="pil"))
        self.merge, self.patch = self._sizes(config)

    @property
    def settings(self) -> dict[str, Any]:
        """Equal for readers that make equal tokens and patches of an image."""
        given = self.processor.to_dict()
        ignored = ("image_processor_type", "processor_class")
        return {name: value for name, value in given.items() if name not in ignored} | {
            "placeholder": self.placeholder,
            "patch": self.patch,
            "merge": self.merge,
        }

    @property
    def patches_per_token(self) -> int:
        return self.merge**2

    @property
    def cell(self) -> int:
        """Side of an image token in pixels."""
        return self.patch * self.merge

    def read(self, pixels: np.ndarray) -> ModelInput:
        _check(pixels)
        height, width = self._final_size(*pixels.shape[:2])
        return self._in_stream(self._image(_resized(pixels, height, width, self.processor.resample)))

    def grid(self, image: ImageChunk) -> tuple[int, int]:
        """Return rows and columns of the image's tokens.

        Raises:
            ValueError: its pixels are missing, or of a size that this model cannot read.
        """
        if image.pixels is None:
            raise ValueError(f"the pixels of an image are missing (digest {image.digest}), so it cannot be read")
        height, width = image.pixels.shape[:2]
        rows, columns = height // self.cell, width // self.cell
        fits = (rows * self.cell, columns * self.cell, rows * columns) == (height, width, image.tokens)
        if not fits or image.placeholder != self.placeholder:
            raise ValueError(
                f"an image of {height} x {width} pixels and {image.tokens} tokens was not read by the reader of this "
                f"model ('{self.folder}'), which makes a token of {self.cell} x {self.cell} pixels"
            )
        return rows, columns

    def blank(self) -> ImageChunk:
        """Return a small black image."""
        return self._image(np.zeros((*self._final_size(1, 1), 3), dtype=np.uint8))

    @abstractmethod
    def patches(self, images: Sequence[ImageChunk]) -> dict[str, Tensor]:
        """Return the arguments of the model's ``get_image_features``, which are computed from final pixels."""

    @abstractmethod
    def _sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        """Return how many patches are a token in each direction, and the side of a patch in pixels."""

    @abstractmethod
    def _final_size(self, height: int, width: int) -> tuple[int, int]: ...

    def _in_stream(self, image: ImageChunk) -> ModelInput:
        """Return the image with the tokens around it that the template does not write."""
        return ModelInput((image,))

    def _image(self, pixels: np.ndarray) -> ImageChunk:
        pixels.setflags(write=False)
        rows, columns = pixels.shape[0] // self.cell, pixels.shape[1] // self.cell
        content = blake2b(f"{pixels.shape} {self.patch} {self.merge} ".encode(), digest_size=16)
        content.update(pixels.tobytes())
        return ImageChunk(content.hexdigest(), self.placeholder, rows * columns, pixels)


class QwenVLReader(FamilyReader):
    """Images of any size and shape; the template writes the tokens around them."""

    rotary = True

    def _sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        return int(self.processor.merge_size), int(self.processor.patch_size)

    def _final_size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # slow

        areas = self.processor.size
        least, most = int(areas["shortest_edge"]), int(areas["longest_edge"])
        return cast(tuple[int, int], smart_resize(height, width, self.cell, least, most))

    def patches(self, images: Sequence[ImageChunk]) -> dict[str, Tensor]:
        return dict(_processed(self.processor, [image.pixels for image in images]))


class Idefics3Reader(FamilyReader):
    """Square images of one size, also of the family SmolVLM. They are not split into tiles."""

    def _sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        sizes = cast(Any, config)
        return int(sizes.scale_factor), int(sizes.vision_config.patch_size)

    def _final_size(self, height: int, width: int) -> tuple[int, int]:
        side = int(self.processor.max_image_size["longest_edge"])
        return side, side

    def _in_stream(self, image: ImageChunk) -> ModelInput:
        before, after = self._around
        return ModelInput((before, image, after))

    @cached_property
    def _around(self) -> tuple[TextChunk, TextChunk]:
        """The tokens that stand before and behind an image.

        Raises:
            ConfigError: the tokenizer lacks the mark of an image.
        """
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        before, after = (
            tokenizer.encode(text, add_special_tokens=False) for text in (IDEFICS3_MARK + IDEFICS3_WHOLE, IDEFICS3_MARK)
        )
        if len(after) != 1 or tokenizer.decode(after) != IDEFICS3_MARK:
            raise ConfigError(
                f"the tokenizer of '{self.folder}' has no token {IDEFICS3_MARK}, which stands on both sides of an "
                "image; take the tokenizer that belongs to the model, or another model (key model.init_args.model)"
            )
        return TextChunk(tuple(before)), TextChunk(tuple(after))

    def patches(self, images: Sequence[ImageChunk]) -> dict[str, Tensor]:
        processed = _processed(self.processor, [[image.pixels] for image in images], do_image_splitting=False)
        return {"pixel_values": processed["pixel_values"]}  # the mask of padding is all ones: sizes are equal


def _processed(processor: Any, images: list[Any], **settings: Any) -> dict[str, Tensor]:
    """Return what the processor makes of final pixels."""
    found = processor(
        images=images, do_resize=False, input_data_format="channels_last", return_tensors="pt", **settings
    )
    return cast(dict[str, Tensor], found)


def _check(pixels: np.ndarray) -> None:
    """Refuse what is no picture.

    Raises:
        ValueError: one sentence.
    """
    height, width = pixels.shape[:2]
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"the sides of an image may differ by a factor of {MAX_RATIO}, got {height} x {width} pixels")


def _resized(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Return a copy."""
    if pixels.shape[:2] == (height, width):
        return pixels.copy()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.array(image.resize((width, height), Image.Resampling(resample)))


@dataclass(frozen=True)
class PackedImages:
    """Images of one forward pass: each different image is read once, however often it appears."""

    patches: dict[str, Tensor]  # of the different images: arguments of the model's ``get_image_features``
    places: Tensor  # [M] int64, index into the flat ids of each token of an image, ascending
    tokens: Tensor  # [M] int64, which of the tokens of the different images it is

    def cut(self, start: int, size: int) -> PackedImages:
        """Return those tokens of the images that are among ``size`` tokens of a row from ``start`` on."""
        inside = (self.places >= start) & (self.places < start + size)
        return replace(self, places=self.places[inside] - start, tokens=self.tokens[inside])


@dataclass(frozen=True)
class Tokens:
    """Inputs of a model at N places."""

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


def text_decoder(lm: PreTrainedModel) -> PreTrainedModel:
    """Return what computes hidden states of tokens; of a model for text alone, all but its output head."""
    whole = has_tower(lm) or lm.base_model is lm  # Llama 4 does not name its trunk as others do
    return cast(PreTrainedModel, cast(Any, lm.base_model).get_decoder() if whole else lm.base_model)


def tower(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that make features of images, with the projection to the size of the text model, if any."""
    text = text_decoder(lm)
    return {name: part for name, part in lm.base_model.named_children() if has_tower(lm) and part is not text}


def trains_tower(lm: PreTrainedModel) -> bool:
    return any(weight.requires_grad for part in tower(lm).values() for weight in part.parameters())


def has_tower(lm: PreTrainedModel) -> bool:
    """Return whether a model is one of text and something else, which it may or may not be used for."""
    return lm.config.get_text_config() is not lm.config


def image_features(lm: PreTrainedModel, images: PackedImages) -> tuple[Tensor, list[Tensor]]:
    """Return features [M, H] of the image tokens, and those that are added behind the first layers, if any."""
    with nullcontext() if trains_tower(lm) else torch.no_grad():
        found = cast(Any, lm.base_model).get_image_features(**images.patches, return_dict=True)
    levels = getattr(found, "deepstack_features", None) or []
    features, *further = (
        torch.cat(list(level)).index_select(0, images.tokens) for level in (found.pooler_output, *levels)
    )
    return features, further
