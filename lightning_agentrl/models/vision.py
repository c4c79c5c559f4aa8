"""Images: conversion to tokens and patches, their places among packed tokens, and the vision tower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import isqrt
from typing import Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.types.model_input import ImageChunk, ImageReader, ModelInput, TextChunk
from lightning_agentrl.types.transfer import integers, to_device

MAX_RATIO = 200  # largest ratio of the longer side to the shorter side
IDEFICS3_MARK, IDEFICS3_WHOLE = "<fake_token_around_image>", "<global-img>"
GEMMA3_MARK = "<start_of_image>"
GEMMA3_MARKED = f"\n\n{GEMMA3_MARK}<image_soft_token><end_of_image>\n\n"


class FamilyReader(ImageReader, ABC):
    """Reader of images for one family of models, with the image processor in the model's folder.

    Images are always resized with Pillow, since other libraries round differently.
    """

    rotary: ClassVar[bool] = False
    """Whether each token has three positions: in time, rows and columns."""
    bidirectional: ClassVar[bool] = False
    """Whether the tokens of an image attend to each other in both directions."""

    def __init__(self, config: PreTrainedConfig, folder: str) -> None:
        self.placeholder = int(cast(Any, config).image_token_id)
        self.folder = folder
        self.processor = cast(Any, AutoImageProcessor.from_pretrained(folder, backend="pil"))
        self.merge, self.patch = self._sizes(config)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that determine the tokens and patches of an image; readers with equal settings are equivalent."""
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
        """Side of the square that one image token covers, in pixels."""
        return self.patch * self.merge

    def marked(self, text: str) -> str:
        return text

    def read(self, pixels: np.ndarray) -> ModelInput:
        _check(pixels)
        height, width = self._final_size(*pixels.shape[:2])
        return self._in_stream(self._image(_resized(pixels, height, width, self.processor.resample)))

    def grid(self, image: ImageChunk) -> tuple[int, int]:
        """Return the numbers of rows and columns of an image's tokens.

        Raises:
            ValueError: the image's pixels are missing, or another model's reader has read the image.
        """
        if image.pixels is None:
            raise ValueError(f"the pixels of an image are missing (digest {image.digest}), so it cannot be read")
        height, width = image.pixels.shape[:2]
        rows, columns = height // self.cell, width // self.cell
        fits = (rows * self.cell, columns * self.cell, rows * columns) == (height, width, image.tokens)
        if not fits or image.placeholder != self.placeholder:
            raise ValueError(
                f"an image of {height} x {width} pixels and {image.tokens} tokens was prepared for another model; the "
                f"reader of '{self.folder}' makes a token of {self.cell} x {self.cell} pixels"
            )
        return rows, columns

    def blank(self) -> ImageChunk:
        """Return a small black image."""
        return self._image(np.zeros((*self._final_size(1, 1), 3), dtype=np.uint8))

    @abstractmethod
    def patches(self, images: Sequence[ImageChunk]) -> dict[str, Tensor]:
        """Return the arguments of the model's ``get_image_features`` for images that are already resized."""

    @abstractmethod
    def _sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        """Return the number of patches per token in each direction, and the side of a patch in pixels."""

    @abstractmethod
    def _final_size(self, height: int, width: int) -> tuple[int, int]: ...

    def _in_stream(self, image: ImageChunk) -> ModelInput:
        """Return the image with surrounding tokens that the chat template leaves out."""
        return ModelInput((image,))

    def _image(self, pixels: np.ndarray) -> ImageChunk:
        pixels.setflags(write=False)
        rows, columns = pixels.shape[0] // self.cell, pixels.shape[1] // self.cell
        content = blake2b(f"{pixels.shape} {self.patch} {self.merge} ".encode(), digest_size=16)
        content.update(pixels.tobytes())
        return ImageChunk(content.hexdigest(), self.placeholder, rows * columns, pixels)


class QwenVLReader(FamilyReader):
    """Reader for Qwen-VL: images of any size and shape; the chat template writes the tokens around images."""

    rotary = True

    def _sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        return int(self.processor.merge_size), int(self.processor.patch_size)

    def _final_size(self, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # a slow import

        areas = self.processor.size
        least, most = int(areas["shortest_edge"]), int(areas["longest_edge"])
        return cast(tuple[int, int], smart_resize(height, width, self.cell, least, most))

    def patches(self, images: Sequence[ImageChunk]) -> dict[str, Tensor]:
        return dict(_processed(self.processor, [image.pixels for image in images]))


class Idefics3Reader(FamilyReader):
    """Reader for Idefics3 and SmolVLM: resizes images to a square of fixed size, without a split into tiles."""

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
        """Tokens before and after an image.

        Raises:
            ConfigError: the tokenizer lacks the token that marks an image.
        """
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        before, after = (
            tokenizer.encode(text, add_special_tokens=False) for text in (IDEFICS3_MARK + IDEFICS3_WHOLE, IDEFICS3_MARK)
        )
        if len(after) != 1 or tokenizer.decode(after) != IDEFICS3_MARK:
            raise ConfigError(
                f"the tokenizer of '{self.folder}' has no token {IDEFICS3_MARK}, which must surround an image; use the "
                "tokenizer that belongs to the model, or another model (key model.init_args.model)"
            )
        return TextChunk(tuple(before)), TextChunk(tuple(after))

    def patches(self, images: Sequence[ImageChunk]) -> dict[str, Tensor]:
        processed = _processed(self.processor, [[image.pixels] for image in images], do_image_splitting=False)
        return {"pixel_values": processed["pixel_values"]}  # the padding mask is not needed, since all sizes are equal


class Gemma3Reader(FamilyReader):
    """Reader for Gemma 3: resizes images to a square of fixed size, without additional crops (pan and scan)."""

    bidirectional = True

    def marked(self, text: str) -> str:
        """Add the marks before tokenization, since the tokenizer merges adjacent line breaks into one token."""
        return text.replace(GEMMA3_MARK, GEMMA3_MARKED)

    def _sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        sizes = cast(Any, config)
        patch = int(sizes.vision_config.patch_size)
        return sizes.vision_config.image_size // patch // isqrt(sizes.mm_tokens_per_image), patch

    def _final_size(self, height: int, width: int) -> tuple[int, int]:
        size = self.processor.size
        return int(size["height"]), int(size["width"])

    def patches(self, images: Sequence[ImageChunk]) -> dict[str, Tensor]:
        processed = _processed(self.processor, [image.pixels for image in images], do_pan_and_scan=False)
        return {"pixel_values": processed["pixel_values"]}


def _processed(processor: Any, images: list[Any], **settings: Any) -> dict[str, Tensor]:
    """Run an image processor on pixels that are already resized."""
    found = processor(
        images=images, do_resize=False, input_data_format="channels_last", return_tensors="pt", **settings
    )
    return cast(dict[str, Tensor], found)


def _check(pixels: np.ndarray) -> None:
    """Refuse images that are too narrow.

    Raises:
        ValueError: the ratio of the sides is above ``MAX_RATIO``.
    """
    height, width = pixels.shape[:2]
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"the sides of an image may differ by at most a factor of {MAX_RATIO}, got {height} x {width}")


def _resized(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Return a resized copy."""
    if pixels.shape[:2] == (height, width):
        return pixels.copy()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.array(image.resize((width, height), Image.Resampling(resample)))


@dataclass(frozen=True)
class PackedImages:
    """Images of one forward pass; the tower reads each distinct image once, however often it appears."""

    patches: dict[str, Tensor]  # arguments of the model's ``get_image_features`` for the distinct images
    places: Tensor  # [M] int64, indices of image tokens in the flat ids, ascending
    tokens: Tensor  # [M] int64, index of each image token's feature among the features of the distinct images
    firsts: Tensor | None = None  # [M] int64, index of the first token of each token's image; None: attention is causal

    def starts(self, count: int) -> Tensor | None:
        """Return the index [N] of the first token that attends to each of N flat ids; None means the token itself."""
        if self.firsts is None:
            return None
        return torch.arange(count, device=self.places.device).index_copy(0, self.places, self.firsts)

    def cut(self, start: int, size: int) -> PackedImages:
        """Return the image tokens among ``size`` tokens of a row from ``start`` on."""
        inside = (self.places >= start) & (self.places < start + size)
        return replace(self, places=self.places[inside] - start, tokens=self.tokens[inside], firsts=None)


@dataclass(frozen=True)
class Tokens:
    """Model inputs for N tokens."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, or [3, N] for models with positions in time, rows and columns
    images: PackedImages | None

    @property
    def starts(self) -> Tensor | None:
        """Index of the first token that attends to each token; see :meth:`PackedImages.starts`."""
        return None if self.images is None else self.images.starts(len(self.ids))


Found = list[tuple[int, ImageChunk]]  # images with the indices of their first tokens, ascending


def find_tokens(
    keys: Sequence[int],
    positions_N: Tensor,
    ends_N: Tensor,
    inputs: Iterable[Sequence[ImageChunk]],
    reader: FamilyReader | None,
    feed_tower: bool = False,
) -> Tokens:
    """Convert keys of tokens to model inputs: ids, positions and images.

    Args:
        keys: keys of N tokens, with whole images only.
        positions_N: positions of the tokens, as if images were text.
        ends_N: end of each token's subtree; tokens from each token up to this index see that token.
        inputs: for each row, the images that can occur.
        reader: image reader of the model; None for a text-only model.
        feed_tower: whether to add a blank image if there is none, so that the vision tower gets gradients.

    Raises:
        ValueError: the pixels of an image are missing, or another model's reader has read the image.
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
    firsts = [place for place, image in found for _ in image.ids]
    return PackedImages(
        {name: to_device(x, device) for name, x in reader.patches(list(different.values())).items()},
        integers(places, device),
        integers(tokens, device),
        integers(firsts, device) if reader.bidirectional and found else None,
    )


def rotary_positions(positions_N: Tensor, ends_N: Tensor, found: Found, reader: FamilyReader) -> Tensor:
    """Return rotary positions [3, N] in time, rows and columns.

    A text token has the same position in all three. The tokens of an image count rows and columns from the position
    after the text before it, and the text after it continues from the longer side.

    Args:
        positions_N: positions of the tokens in their rows, as if images were text, on the CPU.
        ends_N: end of each token's subtree, on the CPU; tokens from each token up to this index see that token.
        found: images with the indices of their first tokens.
        reader: image reader of the model.
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
    """Return the module that computes hidden states of tokens; for a text-only model, all but its output head."""
    whole = has_tower(lm) or lm.base_model is lm  # Llama 4 has no attribute for its base model
    return cast(PreTrainedModel, cast(Any, lm.base_model).get_decoder() if whole else lm.base_model)


def tower(lm: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that compute image features, with the projection to the text model's size; empty if none."""
    text = text_decoder(lm)
    return {name: part for name, part in lm.base_model.named_children() if has_tower(lm) and part is not text}


def trains_tower(lm: PreTrainedModel) -> bool:
    return any(weight.requires_grad for part in tower(lm).values() for weight in part.parameters())


def has_tower(lm: PreTrainedModel) -> bool:
    """Return whether a model has modules besides its text model, such as a vision tower, used or not."""
    return lm.config.get_text_config() is not lm.config


def image_features(lm: PreTrainedModel, images: PackedImages) -> tuple[Tensor, list[Tensor]]:
    """Return features [M, H] of the image tokens, and the features that are added after the first layers, if any."""
    with nullcontext() if trains_tower(lm) else torch.no_grad():
        found = cast(Any, lm.base_model).get_image_features(**images.patches, return_dict=True)
    levels = getattr(found, "deepstack_features", None) or []
    features, *further = (
        torch.cat(list(level)).index_select(0, images.tokens) for level in (found.pooler_output, *levels)
    )
    return features, further
