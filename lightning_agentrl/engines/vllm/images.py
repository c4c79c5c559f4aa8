"""Image inputs for vLLM: the trainer's token ids and patches, so that vLLM does not expand or resize images again."""

from __future__ import annotations

import importlib.util
from typing import Any

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.vision import FamilyReader, Gemma3Reader, QwenVLReader
from lightning_agentrl.types import ImageChunk, ModelInput
from lightning_agentrl.types.model_input import check_text_only

LEAST_TOKENS = 4  # smallest number of tokens of an image with its start and end tokens


def image_arguments(reader: FamilyReader | None, max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that concern images.

    Args:
        reader: image reader of the policy; with None, and with the reader of Gemma 3, vLLM reads text only.
        max_model_len: largest number of tokens of a prompt and its reply.

    Raises:
        ConfigError: vLLM cannot read images on this machine, or cannot read images for this model.
    """
    if reader is None or isinstance(reader, Gemma3Reader):
        return {"skip_tokenizer_init": True}  # prompts and replies are ids
    if not isinstance(reader, QwenVLReader):
        raise ConfigError(
            f"VLLMEngine reads images with models of the Qwen-VL families only, not with '{reader.folder}'; use "
            "TransformersEngine (key data.init_args.engine)"
        )
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            "vLLM reads images only if torchvision can be imported; install the torchvision that matches your "
            "torch, or use TransformersEngine (key data.init_args.engine)"
        )
    return {
        "limit_mm_per_prompt": {"image": max(1, max_model_len // LEAST_TOKENS), "video": 0},
        "mm_device_do_normalize": False,  # with True, patches would silently be normalized twice
    }


def engine_input(prompt: ModelInput, reader: FamilyReader | None) -> Any:
    """Return a prompt as input of vLLM's engine, with the token range and the hash of each image."""
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
