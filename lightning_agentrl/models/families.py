"""Table of model families: the layers that mix tokens of a row, the operation on the logits, and the image reader.

A family is in the table if a test compares its rows in a prefix tree with single rows. Only the listed mixers may let
a token read other tokens of its row, since only these mixers read the tree; a config does not show which layers mix
tokens. Rows of all other families are computed side by side, with padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_agentrl.models.vision import FamilyReader, Gemma3Reader, Idefics3Reader, QwenVLReader

Mixer = Literal["attention", "sinks", "delta", "mamba2", "short_conv"]
STATES: frozenset[Mixer] = frozenset({"delta", "mamba2", "short_conv"})  # mixers with a recurrent state
LAYERS: dict[Mixer, set[str]] = {  # names of a mixer's layers in `layer_types` of a config
    "attention": {"full_attention", "sliding_attention"},
    "delta": {"linear_attention"},
    "mamba2": {"linear_attention", "hybrid"},
    "short_conv": {"conv"},
}
MIX_NOTHING = {"mlp", "moe"}
Logits = tuple[Literal["times", "over", "cap"], str]


@dataclass(frozen=True)
class Family:
    """Properties of a model family.

    Args:
        mixers: token mixers of its text layers; empty if the text model is a separate family with its own line.
        logits: operation on the output of the vocabulary projection, and the config value that is the factor, divisor
            or cap; None means no operation.
        reader: class that reads images for this family; None means that the family is used for text only.
    """

    mixers: tuple[Mixer, ...] = ("attention",)
    logits: Logits | None = None
    reader: type[FamilyReader] | None = None

    @property
    def engine_shares(self) -> bool:
        """Whether `TransformersEngine` may share prefixes: caches hold keys and values, no recurrent states."""
        return not STATES.intersection(self.mixers)


CAP: Logits = ("cap", "final_logit_softcapping")
SCALE: Logits = ("times", "logit_scale")
OVER: Logits = ("over", "logits_scaling")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        (
            *("afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "ctrl", "cwm", "deepseek_v2"),
            *("deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo"),
            *("fuyu", "gemma", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode"),
            *("gpt_neox", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "jetmoe", "laguna"),
            *("llama", "longcat_flash", "mellum", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3"),
            *("mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon"),
            *("phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text"),
            *("qwen3_vl_text", "seed_oss", "smollm3", "solar_open", "starcoder2", "youtu"),
        ),
        Family(),
    ),
    **dict.fromkeys(("gemma3_text", "gemma4_text", "gemma4_unified_text", "nanochat"), Family(logits=CAP)),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), Family(logits=SCALE)),
    **dict.fromkeys(
        ("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"), Family(logits=OVER)
    ),
    "hyperclovax": Family(logits=("times", "logits_scaling")),
    "minicpm3": Family(logits=OVER),
    **dict.fromkeys(("gpt_oss", "mimo_v2_flash"), Family(("attention", "sinks"))),
    **dict.fromkeys(
        ("kimi_linear", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), Family(("attention", "delta"))
    ),
    "falcon_h1": Family(("attention", "mamba2"), ("times", "lm_head_multiplier")),
    "granitemoehybrid": Family(("attention", "mamba2"), OVER),
    **dict.fromkeys(("bamba", "nemotron_h"), Family(("attention", "mamba2"))),
    **dict.fromkeys(("lfm2", "lfm2_moe"), Family(("attention", "short_conv"))),
    # Models with a vision tower. Models without a reader are used for text only, and keep the tower's weights.
    **dict.fromkeys(
        ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
        Family((), reader=QwenVLReader),
    ),
    **dict.fromkeys(("idefics3", "smolvlm"), Family((), reader=Idefics3Reader)),
    "gemma3": Family((), reader=Gemma3Reader),
    **dict.fromkeys(("gemma4", "mistral3"), Family(())),
}
SHARING = frozenset(name for name, family in FAMILIES.items() if family.mixers)

# These families sample experts in training mode. Their router jitter also selects the candidate experts in evaluation
# mode, so the jitter cannot be set to 0.
RANDOM_ROUTES = {"phimoe"}


def check_family(model: str, config: PreTrainedConfig, key: str = "model.init_args.model") -> None:
    """Refuse models that cannot be trained.

    The check refuses families that have no text-only language model, unless the table lists them. It also refuses
    families that choose experts at random, models that cap attention scores, and models with quantized weights.

    Args:
        model: hub id or folder.
        config: configuration of the model.
        key: config key that set the model, for the error message.

    Raises:
        ValueError: the model cannot be trained; the message names the key.
    """
    text = config.get_text_config()
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    if config.model_type not in FAMILIES and (not class_name or class_name.endswith("ForConditionalGeneration")):
        towers = ", ".join(name for name, family in FAMILIES.items() if not family.mixers)
        raise ValueError(
            f"the model '{model}' is of the family {config.model_type}, which has no text-only language model, and of "
            f"those with a tower only {towers} are supported; choose another model (key {key})"
        )
    if text.model_type in RANDOM_ROUTES:
        raise ValueError(
            f"the model '{model}' is of the family {text.model_type}, which chooses experts at random in training, so "
            f"its log-probs would not match those of sampling; choose another model (key {key})"
        )
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"the model '{model}' caps its attention scores (attn_logit_softcapping in its config), which is not "
            f"supported; choose another model (key {key})"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"the weights of the model '{model}' are quantized (quantization_config in its config), so they cannot be "
            "trained; load it with transformers and dequantize it, save it with save_pretrained, and give that folder "
            f"(key {key})"
        )


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' auto class that loads models of this configuration."""
    family = FAMILIES.get(config.model_type, Family())
    return AutoModelForCausalLM if family.mixers else AutoModelForImageTextToText


def text_family(config: PreTrainedConfig) -> Family | None:
    """Return the family of a model's text decoder; None if the family is not in the table."""
    family = FAMILIES.get(config.get_text_config().model_type)
    return family if family is not None and family.mixers else None


def why_unshared(config: PreTrainedConfig) -> str:
    """Return the reason why a model cannot read rows as a prefix tree; an empty string if the model can."""
    text, family = config.get_text_config(), text_family(config)
    if family is None:
        return f"the family {text.model_type}, with which it was not tested"
    known = MIX_NOTHING.union(*(LAYERS.get(mixer, set()) for mixer in family.mixers))
    others = sorted(set(getattr(text, "layer_types", None) or ()) - known)
    return f"layers of the kind {', '.join(others)}" if others else ""


def final_logits(config: PreTrainedConfig) -> Callable[[Tensor], Tensor] | None:
    """Return the function from the output of the vocabulary projection to logits; None: the identity."""
    family = text_family(config)
    if family is None or family.logits is None:
        return None
    how, name = family.logits
    value = getattr(config.get_text_config(), name, None)
    if value is None:
        return None
    if how == "cap":
        return lambda logits: torch.tanh(logits / value) * value
    return (lambda logits: logits * value) if how == "times" else (lambda logits: logits / value)


def image_reader(config: PreTrainedConfig, folder: str | None) -> FamilyReader | None:
    """Return the image reader of a model; None for a text-only model.

    Args:
        config: configuration of the model.
        folder: hub id or folder of the model.
    """
    family = FAMILIES.get(config.model_type)
    return family.reader(config, str(folder)) if family is not None and family.reader is not None else None


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set all rates of dropout and router jitter to 0, in place and in nested configurations, and return ``config``.

    Training must compute the same probabilities as sampling: with noise the importance ratio would not be 1 before the
    first step, and rows that share a prefix would share the noise.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return config
