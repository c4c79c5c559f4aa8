"""The policy: a causal language model whose logits are computed at chosen positions only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_agentrl.errors import ConfigError, first_line, one_line
from lightning_agentrl.models.demo import demo_model_folder
from lightning_agentrl.models.families import auto_class, check_family, why_unshared, without_dropout
from lightning_agentrl.models.image_reader import READERS, FamilyReader, image_reader
from lightning_agentrl.models.images_in_rows import PackedImages
from lightning_agentrl.models.last_layer import UNIQUE_POSITIONS, skip_unread
from lightning_agentrl.models.packing import Packed
from lightning_agentrl.models.parts import text_decoder
from lightning_agentrl.models.tree_attention import TREE, no_mask
from lightning_agentrl.models.vision import image_features

KEY = "model.init_args.model"  # where a config has the policy
DEMO = "demo"  # the name of the bundled model in a config
LOGITS_PER_CHUNK = 1024  # the vocabulary projection runs on this many positions at a time


@dataclass(frozen=True)
class TokenScores:
    """Scores at R logit positions."""

    logps: Tensor  # [R] log-probability of the token that follows
    entropy: Tensor  # [R] nats
    sum_pi_squared: Tensor | None = None  # [R] sum of squared probabilities over the vocabulary, if requested


def model_name(given: object, key: str) -> str:
    """Return how a model is named; from Python also by a path.

    Raises:
        ConfigError: by something else, such as the model itself.
    """
    if not isinstance(given, str | PathLike):
        raise ConfigError(
            f"{key} takes a hub id, a folder or '{DEMO}', got an object of {type(given).__name__}; a model is given by "
            "the folder that it and its tokenizer were saved to with save_pretrained"
        )
    return str(given)


def resolve_model(model: str) -> str:
    """Return a hub id or folder as given; ``demo`` becomes the folder of the bundled model."""
    if model == DEMO:
        return str(demo_model_folder())
    return str(Path(model).expanduser()) if model.startswith("~") else model


@contextmanager
def naming_model(model: str, key: str = KEY) -> Iterator[None]:
    """Say which model it is that transformers cannot read.

    Args:
        model: hub id or folder.
        key: of the config, where it was given.

    Raises:
        ConfigError: what transformers, or the reader of weights, raised as one sentence.
    """
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = one_line(first_line(error))
        raise ConfigError(f"the model '{model}' cannot be loaded (key {key}): {reason}") from error


def load_tokenizer(model: str, key: str = KEY) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Raises:
        ValueError: there is no such model, or it has no tokenizer that can be loaded; names the key.
    """
    _refuse_missing_folder(model, key)
    _refuse_unknown_id(model, key)
    with naming_model(model, key):
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(resolve_model(model)))


def read_config(model: str, key: str = KEY) -> PreTrainedConfig:
    """Return the configuration of a model; no weights are read.

    Raises:
        ConfigError: it cannot be loaded; names the key.
    """
    with naming_model(model, key):
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(resolve_model(model)))


def read_context_length(model: str) -> int:
    """Return how many tokens a model can read, from its config alone; of longer rows each would depend on the others.

    Raises:
        ConfigError: it does not say so.
    """
    return _context_length(read_config(model).get_text_config(), model)


def _context_length(config: PreTrainedConfig, model: str) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"the config of the model '{model}' (family {config.model_type}) does not say how many tokens it can read; "
            f"write max_position_embeddings into its config.json, or choose another model (key {KEY})"
        )
    return min([length, *_lengths_of_one_rotation(config)])


def _lengths_of_one_rotation(config: PreTrainedConfig) -> list[int]:
    """Return the lengths up to which LongRoPE, if the model has it, turns all rows by the same frequencies.

    A longer row would change those of all rows that are read beside it, and of its own keys that were read before.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return [part["original_max_position_embeddings"] for part in of_layers if part.get("rope_type") == "longrope"]


def read_images(model: str) -> FamilyReader | None:
    """Return what reads images for a model; None: it reads text only."""
    with naming_model(model):
        return image_reader(read_config(model), resolve_model(model))


def load_causal_lm(model: str) -> PreTrainedModel:
    """Load a pretrained causal language model, which may also read images.

    Its text attends over prefix trees if its layers support it.
    """
    _refuse_missing_folder(model, KEY)
    folder = resolve_model(model)
    config = without_dropout(read_config(model))
    check_family(model, config)
    unshared = why_unshared(config)
    attention: Any = None if unshared else TREE  # None: the default of transformers
    if attention and config.model_type in READERS:
        attention = {"text_config": TREE, "vision_config": "sdpa"}
    with naming_model(model):
        lm = cast(
            PreTrainedModel,
            auto_class(config).from_pretrained(
                folder, config=config, dtype=torch.get_default_dtype(), attn_implementation=attention
            ),
        )
    if unshared:
        _try_projection(model, lm)
    else:
        skip_unread(lm)
    return lm


def _refuse_unknown_id(model: str, key: str) -> None:
    """Ask the hub once; loading would retry with growing delays.

    Raises:
        ValueError: the model is neither in the cache nor on the hub.
    """
    if model == DEMO or Path(model).expanduser().exists():
        return
    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        model_info(model, timeout=10)
    except Exception as error:
        raise ValueError(
            f"the model '{model}' is not a folder and not in the cache, and the hub does not have it "
            f"({first_line(error)}); give a hub id, a local folder or '{DEMO}' (key {key})"
        ) from error


def _refuse_missing_folder(model: str, key: str) -> None:
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_local and not (Path(model).expanduser() / "config.json").exists():
        raise ValueError(
            f"there is no model folder '{model}' (no config.json in it); "
            f"give a hub id, a local folder or '{DEMO}' (key {key})"
        )


@torch.no_grad()
def _try_projection(model: str, lm: PreTrainedModel) -> None:
    """Compare logits with the plain vocabulary projection, for a family that is not known to leave them unchanged.

    Raises:
        ValueError: when they differ.
    """
    ids = torch.tensor([[0, 1]])
    logits = lm(input_ids=ids, use_cache=False).logits
    trunk, head = lm.base_model, cast(nn.Module, lm.get_output_embeddings())
    if trunk is not lm:
        projected = head(trunk(input_ids=ids, use_cache=False)[0])
        if torch.allclose(logits, projected, rtol=1e-2, atol=1e-2 * float(projected.abs().max())):
            return
    raise ValueError(
        f"the logits of the model '{model}' (family {lm.config.model_type}) are not just the vocabulary projection of "
        f"its last hidden states, which is not supported; choose another model (key {KEY})"
    )


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


def hidden_at_logit_positions(lm: PreTrainedModel, packed: Packed) -> Tensor:
    """Return the last hidden states [R, H] at the logit positions."""
    if packed.tree is None:
        masks: dict[str, Any] = {"attention_mask": packed.padding}
    else:
        masks = {
            "attention_mask": no_mask(packed.ids.device),
            "tree": packed.tree,
            UNIQUE_POSITIONS: packed.unique_positions,
        }
    hidden = read_tokens(lm, packed.ids, packed.positions, packed.images, use_cache=False, **masks)
    return hidden.flatten(0, 1)[packed.logit_positions]


class LanguageModel(nn.Module):
    """A causal language model as policy. The vocabulary projection runs at logit positions only, in chunks.

    Args:
        lm: the model.
        recompute_logits: if more than one chunk needs gradients, recompute each chunk's logits in the backward pass, so
            that only one chunk of logits is in memory at a time.
    """

    def __init__(self, lm: PreTrainedModel, recompute_logits: bool = True) -> None:
        super().__init__()
        self.lm = lm
        self.recompute_logits = recompute_logits
        self.image_reader = image_reader(lm.config, lm.name_or_path)  # None: it reads text only

    @property
    def hidden_size(self) -> int:
        return int(self.lm.config.get_text_config().hidden_size)

    @property
    def context_length(self) -> int:
        return _context_length(self.lm.config.get_text_config(), str(self.lm.name_or_path))

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows may be read as a prefix tree."""
        return not why_unshared(self.lm.config)

    def hidden(self, packed: Packed) -> Tensor:
        """Return the last hidden states [R, H] at the logit positions."""
        return hidden_at_logit_positions(self.lm, packed)

    def token_scores(
        self, hidden_RH: Tensor, targets_R: Tensor, temperature: float, sum_pi_squared: bool = False
    ) -> TokenScores:
        """Return log-probs of ``targets_R`` and entropy, and the sum of squared probabilities if requested.

        All describe the distribution at the sampling temperature, and come from the same logits.
        """
        head = cast(nn.Module, self.lm.get_output_embeddings())
        recompute = self.recompute_logits and torch.is_grad_enabled() and len(targets_R) > LOGITS_PER_CHUNK
        chunks = []
        for hidden, targets in zip(hidden_RH.split(LOGITS_PER_CHUNK), targets_R.split(LOGITS_PER_CHUNK), strict=True):
            if recompute:
                chunk = checkpoint(
                    _head_scores, head, hidden, targets, temperature, sum_pi_squared, use_reentrant=False
                )
            else:
                chunk = _head_scores(head, hidden, targets, temperature, sum_pi_squared)
            chunks.append(cast(tuple[Tensor, ...], chunk))
        return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))

    def distributions(self, hidden_RH: Tensor, temperature: float) -> Tensor:
        """Return log-probs of the whole vocabulary [R, V]; for few positions, since nothing is cut into chunks."""
        logits = cast(nn.Module, self.lm.get_output_embeddings())(hidden_RH)
        return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)


def _head_scores(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, sum_pi_squared: bool
) -> tuple[Tensor, ...]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_pi = logits.log_softmax(-1)
    pi = log_pi.exp()
    logps = log_pi.gather(-1, targets.clamp_min(0)[:, None])[:, 0]
    entropy = -(pi * log_pi).sum(-1)
    return (logps, entropy, pi.square().sum(-1)) if sum_pi_squared else (logps, entropy)
