"""The policy: a causal language model whose logits are computed at chosen positions only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lightning_agentrl.models.attention.tree import no_mask
from lightning_agentrl.models.families import final_logits, image_reader, text_family, why_unshared
from lightning_agentrl.models.loading import UNIQUE_POSITIONS, context_length_of
from lightning_agentrl.models.packing import Packed
from lightning_agentrl.models.sequence import PackedShard
from lightning_agentrl.models.vision import FamilyReader, PackedImages, image_features, text_decoder

LOGITS_PER_CHUNK = 1024  # positions per call of the vocabulary projection


@dataclass(frozen=True)
class TokenScores:
    """Scores at R logit positions."""

    logps: Tensor  # [R] log-prob of the following token
    entropy: Tensor  # [R] nats
    sum_pi_squared: Tensor | None = None  # [R] sum of squared probabilities over the vocabulary, if requested


def read_tokens(
    lm: PreTrainedModel, ids_BL: Tensor, positions: Tensor, images: PackedImages | None = None, **arguments: Any
) -> Tensor:
    """Return the last hidden states [B, L, H] of one forward pass.

    Only the tokens listed in ``images`` are images: a placeholder token that the policy has sampled is text.

    Args:
        lm: the model.
        ids_BL: token ids.
        positions: positions [B, L], or [3, B, L] for models with positions in time, rows and columns.
        images: images among the tokens; None if there are no images.
        arguments: further arguments of the text decoder, such as its mask.
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
    if images.firsts is not None and "tree" not in arguments:
        arguments["attention_mask"] = _masks(lm, ids_BL, images, arguments.get("attention_mask"))
    output = decoder(inputs_embeds=flat.view_as(embeddings), position_ids=positions, **arguments)
    return cast(Tensor, output.last_hidden_state)


def _masks(lm: PreTrainedModel, ids_BL: Tensor, images: PackedImages, padding: Tensor | None) -> dict[str, Tensor]:
    """Return attention masks [B, 1, L, L] by layer type, bidirectional within each image, as Gemma 3 requires.

    Args:
        lm: the model.
        ids_BL: token ids of whole rows: no tokens are cached before the rows.
        images: images among the tokens.
        padding: [B, L], 1 on tokens and 0 on padding; None if there is no padding.
    """
    width = ids_BL.shape[1]
    order = torch.arange(width, device=ids_BL.device)
    starts_BL = cast(Tensor, images.starts(ids_BL.numel())).view_as(ids_BL) % width
    seen = order[:, None] >= starts_BL[:, None]
    if padding is not None:
        seen = seen & padding[:, None].bool()
    near = order[:, None] - order < lm.config.get_text_config().sliding_window
    return {"full_attention": seen[:, None], "sliding_attention": (seen & near)[:, None]}


def hidden_at_logit_positions(lm: PreTrainedModel, packed: Packed) -> Tensor:
    """Return the last hidden states [R, H] at the logit positions."""
    shard = packed.shard if isinstance(packed, PackedShard) else None
    if packed.tree is None:
        masks: dict[str, Any] = {"attention_mask": packed.padding}
    else:
        masks = {
            "attention_mask": no_mask(packed.ids.device),
            "tree": shard or packed.tree,
            **({"seq_idx": packed.tree} if _convolves(lm) else {}),
            UNIQUE_POSITIONS: packed.unique_positions,
        }
    hidden = read_tokens(lm, packed.ids, packed.positions, packed.images, use_cache=False, **masks).flatten(0, 1)
    if shard is not None:
        hidden = shard.to_readers(hidden)
    return hidden[packed.logit_positions]


def _convolves(lm: PreTrainedModel) -> bool:
    """Return whether the model's convolution layers receive no keyword but ``seq_idx``."""
    family = text_family(lm.config)
    return family is not None and "short_conv" in family.mixers


def vocabulary_logits(lm: PreTrainedModel, hidden_RH: Tensor) -> Tensor:
    """Return logits [R, V] of last hidden states [R, H], scaled or capped as the model's family requires."""
    logits = cast(nn.Module, lm.get_output_embeddings())(hidden_RH)
    final = final_logits(lm.config)
    return cast(Tensor, logits if final is None else final(logits))


class LanguageModel(nn.Module):
    """A causal language model as policy. The vocabulary projection runs at logit positions only, in chunks.

    Args:
        lm: the model.
        recompute_logits: whether to recompute logits in the backward pass if there are several chunks, so that only one
            chunk of logits is in memory at a time.
    """

    def __init__(self, lm: PreTrainedModel, recompute_logits: bool = True) -> None:
        super().__init__()
        self.lm = lm
        self.recompute_logits = recompute_logits

    @cached_property
    def image_reader(self) -> FamilyReader | None:
        """Image reader of the model; None for a text-only model."""
        return image_reader(self.lm.config, str(self.lm.name_or_path))

    @property
    def hidden_size(self) -> int:
        return int(self.lm.config.get_text_config().hidden_size)

    @property
    def context_length(self) -> int:
        return context_length_of(self.lm.config.get_text_config(), str(self.lm.name_or_path))

    @cached_property
    def shares_prefixes(self) -> bool:
        """Whether rows may be read as a prefix tree."""
        return not why_unshared(self.lm.config)

    @property
    def engine_shares(self) -> bool:
        """Whether `TransformersEngine` may read prompts as a prefix tree, too."""
        family = text_family(self.lm.config)
        return self.shares_prefixes and family is not None and family.engine_shares

    def hidden(self, packed: Packed) -> Tensor:
        """Return the last hidden states [R, H] at the logit positions."""
        return hidden_at_logit_positions(self.lm, packed)

    def token_scores(
        self, hidden_RH: Tensor, targets_R: Tensor, temperature: float, sum_pi_squared: bool = False
    ) -> TokenScores:
        """Return log-probs of the targets, entropies and, if requested, sums of squared probabilities.

        Args:
            hidden_RH: last hidden states at the logit positions.
            targets_R: token after each position; -1 if there is no next token.
            temperature: sampling temperature, at which all results are computed.
            sum_pi_squared: whether to compute the sums of squared probabilities.
        """
        recompute = self.recompute_logits and torch.is_grad_enabled() and len(targets_R) > LOGITS_PER_CHUNK
        chunks = []
        for hidden, targets in zip(hidden_RH.split(LOGITS_PER_CHUNK), targets_R.split(LOGITS_PER_CHUNK), strict=True):
            if recompute:
                chunk = checkpoint(
                    _head_scores, self.lm, hidden, targets, temperature, sum_pi_squared, use_reentrant=False
                )
            else:
                chunk = _head_scores(self.lm, hidden, targets, temperature, sum_pi_squared)
            chunks.append(cast(tuple[Tensor, ...], chunk))
        return TokenScores(*map(torch.cat, zip(*chunks, strict=True)))

    def distributions(self, hidden_RH: Tensor, temperature: float) -> Tensor:
        """Return log-probs of the whole vocabulary [R, V]; for few positions only, since all logits are in memory."""
        return _log_probs(self.lm, hidden_RH, temperature)


def _log_probs(lm: PreTrainedModel, hidden: Tensor, temperature: float) -> Tensor:
    logits = vocabulary_logits(lm, hidden)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def _head_scores(
    lm: PreTrainedModel, hidden: Tensor, targets: Tensor, temperature: float, sum_pi_squared: bool
) -> tuple[Tensor, ...]:
    log_pi = _log_probs(lm, hidden, temperature)
    pi = log_pi.exp()
    logps = log_pi.gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    entropy = -(pi * log_pi).sum(-1)
    return (logps, entropy, pi.square().sum(-1)) if sum_pi_squared else (logps, entropy)
