"""Models without weights, for planning runs: shapes from `config.json`, or from a table if the hub is unreachable."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from lightning_agentrl.errors import ConfigError
from lightning_agentrl.models.families import auto_class, check_family, without_dropout
from lightning_agentrl.models.loading import KEY, check_model_exists, read_config

QWEN25 = {"vocab_size": 151936, "num_key_value_heads": 2, "max_position_embeddings": 32768, "tie_word_embeddings": True}
LARGE = {"vocab_size": 152064, "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": False}


def _qwen25(base: dict[str, Any], hidden: int, wide: int, layers: int, heads: int, **other: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers}
    return {**base, **sizes, "num_attention_heads": heads, **other}


# Family and sizes, copied from the config.json of each model.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", _qwen25(QWEN25, 896, 4864, 24, 14)),
    "Qwen/Qwen2.5-3B-Instruct": ("qwen2", _qwen25(QWEN25, 2048, 11008, 36, 16)),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", _qwen25(LARGE, 3584, 18944, 28, 28)),
    "Qwen/Qwen2.5-14B-Instruct": ("qwen2", _qwen25(LARGE, 5120, 13824, 48, 40, num_key_value_heads=8)),
    "Qwen/Qwen2.5-32B-Instruct": ("qwen2", _qwen25(LARGE, 5120, 27648, 64, 40, num_key_value_heads=8)),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        "qwen2_5_vl",
        {
            "text_config": _qwen25(LARGE, 3584, 18944, 28, 28, max_position_embeddings=128000),
            "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
            "tie_word_embeddings": False,
        },
    ),
    "Qwen/Qwen3-VL-2B-Instruct": (
        "qwen3_vl",
        {
            "text_config": _qwen25(
                QWEN25, 2048, 6144, 28, 16, num_key_value_heads=8, head_dim=128, max_position_embeddings=262144
            ),
            "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
            | {"deepstack_visual_indexes": [5, 11, 17]},
            "tie_word_embeddings": True,
        },
    ),
}


def shape_of(model: str, key: str = KEY) -> tuple[PreTrainedConfig, bool]:
    """Return the configuration of a model, and whether it comes from the model's folder or the hub.

    Raises:
        ValueError: the configuration cannot be read, and the model is not in the table ``SHAPES``.
    """
    try:
        check_model_exists(model, key)
        return read_config(model, key), True
    except ValueError:
        if model not in SHAPES:
            raise
        family, sizes = SHAPES[model]
        return AutoConfig.for_model(family, **sizes), False


def empty_causal_lm(model: str, head: bool = True, key: str = KEY) -> PreTrainedModel:
    """Return a causal language model on the meta device, without weights.

    Args:
        model: hub id or folder.
        head: unused; the signature is that of `load_causal_lm`.
        key: config key that set the model, for the error message.

    Raises:
        ValueError: the model's shape is not known, or its family is not supported.
    """
    config = without_dropout(shape_of(model, key)[0])
    check_family(model, config, key)
    with torch.device("meta"):
        lm = auto_class(config).from_config(config, dtype=torch.get_default_dtype())
    if not isinstance(lm, PreTrainedModel):
        raise ConfigError(f"the model '{model}' is not a language model of transformers (key {key})")
    lm.name_or_path = model
    return lm
