"""What a model makes of an image: final pixels and their place in the token stream; later, the patches of its tower.

An image is resized once, when it is read. Patches are cut from the pixels of its chunk, so sampling, scoring and
update see the same, whatever size the environment gave.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar, cast

import numpy as np
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedConfig

from lightning_agentrl.errors.problem import ConfigError
from lightning_agentrl.types.model_input import ImageChunk, ImageReader, ModelInput, TextChunk

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
        """Equal where images become equal tokens and patches."""
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


READERS: dict[str, type[FamilyReader]] = {
    "qwen2_5_vl": QwenVLReader,
    "qwen3_vl": QwenVLReader,
    "smolvlm": Idefics3Reader,
    "idefics3": Idefics3Reader,
}


def image_reader(config: PreTrainedConfig, folder: str | None) -> FamilyReader | None:
    """Return the reader of a model; None: it reads text only.

    Args:
        config: of the model.
        folder: hub id or folder.
    """
    reader = READERS.get(config.model_type)
    return None if reader is None else reader(config, str(folder))


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
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        given = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise ValueError(f"an image must be an array uint8 [height, width, 3], got {given}")
    height, width = pixels.shape[:2]
    if not height or not width:
        raise ValueError(f"an image must have at least one pixel, got {height} x {width}")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"the sides of an image may differ by a factor of {MAX_RATIO}, got {height} x {width} pixels")


def _resized(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Return a copy."""
    if pixels.shape[:2] == (height, width):
        return pixels.copy()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.array(image.resize((width, height), Image.Resampling(resample)))
