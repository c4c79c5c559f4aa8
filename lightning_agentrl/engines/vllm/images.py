"""Images as vLLM takes them: the trainer's own ids and patches, so nothing is expanded or resized a second time."""

from __future__ import annotations

import importlib.util
from typing import Any

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.vision import FamilyReader, Gemma3Reader, QwenVLReader
from lightning_agentrl.types import ImageChunk, ModelInput
from lightning_agentrl.types.model_input import check_text_only

LEAST_TOKENS = 4  # of an image and the marks around it


def image_arguments(reader: FamilyReader | None, max_model_len: int) -> dict[str, Any]:
    """Return the arguments with which vLLM reads the images of a model; none if it reads text only, as of Gemma 3.

    Raises:
        ConfigError: vLLM cannot read images here, or not those of this model.
    """
    if reader is None or isinstance(reader, Gemma3Reader):
        return {"skip_tokenizer_init": True}  # ids in, ids out
    if not isinstance(reader, QwenVLReader):
        raise ConfigError(
            f"VLLMEngine reads images with models of the Qwen-VL families only, not with '{reader.folder}'; use "
            "TransformersEngine (key data.init_args.engine)"
        )
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            "vLLM reads images only where torchvision can be imported; install the torchvision that belongs to your "
            "torch, or use TransformersEngine (key data.init_args.engine)"
        )
    return {
        "limit_mm_per_prompt": {"image": max(1, max_model_len // LEAST_TOKENS), "video": 0},
        "mm_device_do_normalize": False,  # else patches would be normalised twice, without an error
    }


def engine_input(prompt: ModelInput, reader: FamilyReader | None) -> Any:
    """Return a prompt as vLLM's engine takes it. Images go with the place and the hash of each."""
    from vllm.inputs.engine import mm_input, tokens_input

    images = prompt.images
    if not isinstance(reader, QwenVLReader):
        check_text_only([prompt], "VLLMEngine")
    if reader is None or not images:
        return tokens_input(list(prompt.ids))
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    patches = reader.patches(images)
    sizes = patches["image_grid_thw"].prod(-1)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    places, start = [], 0
    for chunk in prompt.chunks:
        if isinstance(chunk, ImageChunk):
            places.append(PlaceholderRange(offset=start, length=len(chunk)))
        start += len(chunk)
    return mm_input(
        list(prompt.ids),
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(BatchFeature(patches), fields),
        mm_hashes={"image": [image.digest for image in images]},
        mm_placeholders={"image": places},
    )
