"""What the tower makes of images: features that take the place of the placeholders' embeddings."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_agentrl.models.images_in_rows import PackedImages
from lightning_agentrl.models.parts import trains_tower


def image_features(lm: PreTrainedModel, images: PackedImages) -> tuple[Tensor, list[Tensor]]:
    """Return features [M, H] of the image tokens, and those that are added behind the first layers, if any."""
    with nullcontext() if trains_tower(lm) else torch.no_grad():
        found = cast(Any, lm.base_model).get_image_features(**images.patches, return_dict=True)
    levels = getattr(found, "deepstack_features", None) or []
    features, *further = (
        torch.cat(list(level)).index_select(0, images.tokens) for level in (found.pooler_output, *levels)
    )
    return features, further
