"""Loading of a model's tokenizer, configuration and weights by name, with checks that raise readable errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import model_info, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from lightning.pytorch.utilities import rank_zero_warn
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lightning_agentrl.errors import ConfigError, first_line, one_line
from lightning_agentrl.models.attention.tree import TREE
from lightning_agentrl.models.families import (
    auto_class,
    check_family,
    image_reader,
    text_family,
    why_unshared,
    without_dropout,
)
from lightning_agentrl.models.mixers.functions import read_trees
from lightning_agentrl.models.probe import probe
from lightning_agentrl.models.vision import FamilyReader, text_decoder

DEMO, DEMO_TOOLS = "demo", "demo-tools"  # names of the bundled model in a config


def resolve_model(model: str) -> str:
    """Replace ``demo`` and ``demo-tools`` by the folder of the bundled model; return other ids and folders as given."""
    if model in (DEMO, DEMO_TOOLS):
        # Importing transformers takes seconds.
        from lightning_agentrl.models.demo import demo_model_folder, demo_tools_folder

        return str(demo_model_folder() if model == DEMO else demo_tools_folder())
    return str(Path(model).expanduser()) if model.startswith("~") else model


UNIQUE_POSITIONS = "unique_positions"  # keyword of a model's forward pass: [U] positions whose output is used


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of the language model in a module, each a unit of compilation and sharding.

    Layers of a vision tower are excluded, since micro-batches without images do not run these layers.
    """
    lm = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    modules = [] if lm is None else text_decoder(lm).modules()
    return [module for module in modules if type(module).__name__ in names]


def skip_unread(lm: PreTrainedModel) -> None:
    """Make a model skip the last feed-forward network at positions outside the keyword ``unique_positions``.

    Last hidden states at other positions are then incomplete. The hooks are inside the last layer, so that they also
    run when activations are recomputed; hooks on the layer itself would not run then in every version of transformers.
    Models in whose last layer no attention or feed-forward network is found are left unchanged.
    """
    layers = decoder_layers(lm)
    parts = dict(layers[-1].named_children()) if layers else {}
    network = parts.get("mlp")
    attention = next((part for part in parts.values() if "attention" in type(part).__name__.lower()), None)
    if network is not None and attention is not None:
        attention.register_forward_pre_hook(partial(_hand_places, network), with_kwargs=True)
        network.register_forward_pre_hook(_take)
        network.register_forward_hook(_put_back)


def _hand_places(network: Any, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    network.unique_positions = kwargs.get(UNIQUE_POSITIONS)  # a layer passes all its keywords to its attention


def _take(network: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    if network.unique_positions is None:
        return None
    (hidden_1NH,) = args
    network.all_hidden = hidden_1NH
    return (hidden_1NH[:, network.unique_positions],)


def _put_back(network: Any, args: tuple[Any, ...], out: Any) -> Any:
    if network.unique_positions is None:
        return out
    places, everywhere = network.unique_positions, network.all_hidden
    network.unique_positions = network.all_hidden = None
    out_1UH, *rest = out if isinstance(out, tuple) else (out,)  # mixtures of experts may also return router scores
    whole = torch.zeros_like(everywhere, dtype=out_1UH.dtype).index_copy(1, places, out_1UH)
    return (whole, *rest) if isinstance(out, tuple) else whole


KEY = "model.init_args.model"  # config key of the policy


def model_name(given: object, key: str) -> str:
    """Return the hub id or folder of a model as a string.

    Args:
        given: hub id or folder, as a string or path.
        key: config key that set the model, for the error message.

    Raises:
        ConfigError: ``given`` has another type, such as the model itself.
    """
    if not isinstance(given, str | PathLike):
        raise ConfigError(
            f"{key} takes a hub id, a folder or '{DEMO}', got an object of {type(given).__name__}; save the model and "
            "its tokenizer to a folder with save_pretrained, and give that folder"
        )
    return str(given)


@contextmanager
def naming_model(model: str, key: str = KEY) -> Iterator[None]:
    """Add the model and its config key to errors of transformers and safetensors.

    Args:
        model: hub id or folder.
        key: config key that set the model, for the error message.

    Raises:
        ConfigError: the model cannot be loaded; the message contains the original error as one sentence.
    """
    try:
        yield
    except ConfigError:  # the error already names the model and the key
        raise
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        reason = one_line(first_line(error))
        raise ConfigError(f"the model '{model}' cannot be loaded (key {key}): {reason}") from error


def load_tokenizer(model: str, key: str = KEY) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        model: hub id or folder.
        key: config key that set the model, for the error message.

    Raises:
        ValueError: the model does not exist, its tokenizer cannot be loaded, or the tokenizer has tokens that the model
            has no embedding for; the message names the key.
    """
    check_model_exists(model, key)
    with naming_model(model, key):
        tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(resolve_model(model)))
    _refuse_tokens_beyond(model, key, tokenizer)
    return tokenizer


def read_config(model: str, key: str = KEY) -> PreTrainedConfig:
    """Load the configuration of a model, without weights.

    Args:
        model: hub id or folder.
        key: config key that set the model, for the error message.

    Raises:
        ConfigError: the configuration cannot be loaded; the message names the key.
    """
    with naming_model(model, key):
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(resolve_model(model)))


def read_context_length(model: str) -> int:
    """Return the context length of a model in tokens, from its config alone.

    For LongRoPE, return the length up to which all rows have the same frequencies.

    Raises:
        ConfigError: the config does not contain the context length.
    """
    return context_length_of(read_config(model).get_text_config(), model)


def context_length_of(config: PreTrainedConfig, model: str) -> int:
    """Return the context length as :func:`read_context_length` does, given the config of a model's text decoder."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ConfigError(
            f"the config of the model '{model}' (family {config.model_type}) does not state its context length; "
            f"write max_position_embeddings into its config.json, or choose another model (key {KEY})"
        )
    return min([length, *_lengths_of_one_rotation(config)])


def _lengths_of_one_rotation(config: PreTrainedConfig) -> list[int]:
    """Return the lengths up to which LongRoPE uses its first set of frequencies; empty if the model has no LongRoPE.

    A longer row would switch the frequencies of all rows in its batch, and would not match its own cached keys.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return [part["original_max_position_embeddings"] for part in of_layers if part.get("rope_type") == "longrope"]


def read_images(model: str) -> FamilyReader | None:
    """Return the image reader of a model; None for a text-only model."""
    with naming_model(model):
        return image_reader(read_config(model), resolve_model(model))


def load_causal_lm(model: str, head: bool = True, key: str = KEY) -> PreTrainedModel:
    """Load a pretrained causal language model, with or without a vision tower.

    The model uses tree attention if its family supports prefix trees.

    Args:
        model: hub id or folder.
        head: whether logits are needed, so that the weights of the output head must exist.
        key: config key that set the model, for the error message.

    Raises:
        ConfigError: the model cannot be loaded, its files lack weights, or weights are not finite.
    """
    _refuse_missing_folder(model, key)
    folder = resolve_model(model)
    config = without_dropout(read_config(model, key))
    check_family(model, config, key)
    unshared = why_unshared(config)
    attention: Any = None if unshared else TREE  # None: the default of transformers
    if attention and config.get_text_config() is not config:
        attention = dict.fromkeys(config.sub_configs, "sdpa") | {"text_config": TREE}
    with naming_model(model, key):
        lm, found = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=torch.get_default_dtype(),
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # other sizes are refused below with a clearer message
        )
    lm = cast(PreTrainedModel, lm)
    _refuse_random_weights(model, lm, found, head, key)
    _refuse_weights_not_finite(model, lm, key)
    family = text_family(config)
    if family is not None and not family.engine_shares and not unshared:
        read_trees(text_decoder(lm))
    if unshared:
        _try_projection(model, lm, key)
        rank_zero_warn(
            f"'{model}' ({unshared}) cannot read prefix trees, so the common prefixes of prompts are computed again "
            f"for each turn; {probe(model, lm, key)}"
        )
    else:
        skip_unread(lm)
    return lm


def _refuse_random_weights(model: str, lm: PreTrainedModel, found: dict[str, Any], head: bool, key: str) -> None:
    """Refuse a model whose files lack weights or have another shape; transformers would draw such weights at random.

    Raises:
        ConfigError: weights are missing; the message names one missing weight.
    """
    last = lm.get_output_embeddings()
    unread = set() if head or last is None else {id(weight) for weight in last.parameters()}
    unwanted = {name for name, weight in lm.named_parameters(remove_duplicate=False) if id(weight) in unread}
    lacks = sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])} - unwanted)
    if lacks:
        more = f" and {len(lacks) - 1} more weights" if len(lacks) > 1 else ""
        raise ConfigError(
            f"the files of the model '{model}' lack {lacks[0]}{more}, or have another shape there; check that no file "
            f"is missing and that config.json belongs to this model (key {key})"
        )


def _refuse_weights_not_finite(model: str, lm: PreTrainedModel, key: str) -> None:
    """Refuse a model with NaN or infinity in its weights.

    Raises:
        ConfigError: weights are not finite; the message names one such weight.
    """
    weights = {name: weight for name, weight in lm.state_dict().items() if weight.is_floating_point()}
    # aminmax propagates NaN and is many times faster than isfinite.
    bad = [name for name, weight in weights.items() if not torch.stack(weight.aminmax()).isfinite().all()]
    if bad:
        more = f" and {len(bad) - 1} more weights" if len(bad) > 1 else ""
        raise ConfigError(
            f"the model '{model}' has NaN or infinity in {bad[0]}{more}; its files are damaged, or its training "
            f"diverged; choose an earlier checkpoint or another model (key {key})"
        )


def _refuse_tokens_beyond(model: str, key: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with tokens that can occur in a prompt but have no embedding in the model.

    Special tokens that the chat template does not contain are allowed, since they are never encoded from environment
    text. In text-only models such as Gemma 3, for example, the image placeholder is beyond the embedding.

    Raises:
        ConfigError: the tokenizer has such tokens; the message names one token.
    """
    size = getattr(read_config(model, key).get_text_config(), "vocab_size", None)
    if size is None:
        return
    written = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token}"
    unused = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in written
    }
    beyond = [text for text, number in tokenizer.get_vocab().items() if number >= size and number not in unused]
    if beyond:
        more = f" and {len(beyond) - 1} more tokens" if len(beyond) > 1 else ""
        raise ConfigError(
            f"the tokenizer of the model '{model}' has the token {min(beyond)!r}{more} beyond the {size} that the "
            "model reads (vocab_size in its config.json); save the model after resize_token_embeddings, or use the "
            f"model's own tokenizer (key {key})"
        )


def check_model_exists(model: str, key: str = KEY) -> None:
    """Check that a model folder exists, or that a hub id is in the cache or on the hub.

    Args:
        model: hub id or folder.
        key: config key that set the model, for the error message.

    Raises:
        ValueError: the model does not exist; the message names the key.
    """
    _refuse_missing_folder(model, key)
    _refuse_unknown_id(model, key)


def _refuse_unknown_id(model: str, key: str) -> None:
    """Refuse a hub id that is unknown, with a single request: loading would retry with growing delays.

    Raises:
        ValueError: the model is neither in the cache nor on the hub.
    """
    if model in (DEMO, DEMO_TOOLS) or Path(model).expanduser().exists():
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
    if model in (DEMO, DEMO_TOOLS):
        return
    path = Path(model).expanduser()
    looks_local = model.startswith((".", "/", "~")) or path.exists() or not _may_be_an_id(model)
    if looks_local and not (path / "config.json").exists():
        raise ValueError(
            f"there is no model folder '{model}' (no config.json in it); "
            f"give a hub id, a local folder or '{DEMO}' (key {key})"
        )


def _may_be_an_id(model: str) -> bool:
    try:
        try_to_load_from_cache(model, "config.json")  # raises an error for strings that cannot be an id
    except HFValidationError:
        return False
    return True


@torch.no_grad()
def _try_projection(model: str, lm: PreTrainedModel, key: str) -> None:
    """Check that logits of an untested family are the plain vocabulary projection of its last hidden states.

    Raises:
        ValueError: logits and projection differ, for example because the family scales or caps logits.
    """
    ids = torch.tensor([[0, 1]])
    logits = lm(input_ids=ids, use_cache=False).logits
    head = cast(nn.Module, lm.get_output_embeddings())
    projected = head(text_decoder(lm)(input_ids=ids, use_cache=False)[0])
    if torch.allclose(logits, projected, rtol=1e-2, atol=1e-2 * float(projected.abs().max())):
        return
    raise ValueError(
        f"the logits of the model '{model}' (family {lm.config.model_type}) are not just the vocabulary projection of "
        f"its last hidden states, which is not supported; choose another model (key {key})"
    )
