"""How a model reads tokens, images among them: features of the tower in place of the placeholders' embeddings."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightning_agentrl.models.images_in_rows import PackedImages
from lightning_agentrl.models.parts import text_decoder, trains_tower


def read_tokens(
    lm: PreTrainedModel, ids_BL: Tensor, positions: Tensor, images: PackedImages | None = None, **arguments: Any
) -> Tensor:
    """Return the last hidden states [B, L, H] of one forward pass.

    Only ``images`` says which tokens are images. A placeholder that the policy has sampled is text.

    Args:
        lm: the model.
        ids_BL: token ids.
        positions: [B, L], or [3, B, L] where images have positions of their own.
        images: among the tokens; None: there are none.
        arguments: further ones of the text decoder, such as its mask.
    """
    decoder = text_decoder(lm)
    if images is None:
        return cast(Tensor, decoder(input_ids=ids_BL, position_ids=positions, **arguments).last_hidden_state)
    features_MH, further = image_features(lm, images)
    embeddings = lm.get_input_embeddings()(ids_BL)
    flat = embeddings.flatten(0, 1)
    flat = flat.index_copy(0, images.places, features_MH.to(flat.dtype))
    if further:
        is_image = torch.zeros(ids_BL.numel(), dtype=torch.bool, device=ids_BL.device)
        is_image[images.places] = True
        arguments |= {"visual_pos_masks": is_image.view_as(ids_BL), "deepstack_visual_embeds": further}
    output = decoder(inputs_embeds=flat.view_as(embeddings), position_ids=positions, **arguments)
    return cast(Tensor, output.last_hidden_state)


def image_features(lm: PreTrainedModel, images: PackedImages) -> tuple[Tensor, list[Tensor]]:
    """Return features [M, H] of the image tokens, and those that are added behind the first layers, if any."""
    with nullcontext() if trains_tower(lm) else torch.no_grad():
        found = cast(Any, lm.base_model).get_image_features(**images.patches, return_dict=True)
    levels = getattr(found, "deepstack_features", None) or []
    features, *further = (
        torch.cat(list(level)).index_select(0, images.tokens) for level in (found.pooler_output, *levels)
    )
    return features, further
