"""Model families: which are supported, and which can read several rows as one prefix tree.

A family can if its attention passes the tree on, with its windows, and nothing else in it looks along the row: no
state, no local mixing of neighbours, no positions or biases derived from the place in the row. A config does not say
so; the list below holds the families that were tested. All others read their rows side by side.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightning_agentrl.models.vision import READERS

# Each is compared with single rows in tests/models/test_families.py, with windows where the family has them.
SHARING = frozenset(
    {
        *("apertus", "arcee", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo"),
        *("gemma", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox"),
        *("granite", "granitemoe", "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral", "ministral3"),
        *("minimax_m2", "mistral", "mixtral", "modernbert-decoder", "olmo", "olmo2", "olmo3", "olmoe"),
        *("opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
    }
)
# Parts of models that read images; these are compared in tests/models/test_vision.py.
SHARING_WITH_IMAGES = frozenset({"qwen2_5_vl_text", "qwen3_vl_text"})
# In training mode these sample experts; their jitter also chooses among which, in evaluation too, so it cannot be 0.
RANDOM_ROUTES = {"phimoe"}
LAYERS = {"full_attention", "sliding_attention"}
AS_PROJECTED = {  # with these values logits are the plain vocabulary projection, and attention scores plain products
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def check_family(model: str, config: PreTrainedConfig, key: str = "model.init_args.model") -> None:
    """Refuse families that are neither text-only language models nor ones whose images can be read, those that route at
    random, and those that change their logits after the projection.

    Raises:
        ValueError: one sentence with the key to change.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    if config.model_type not in READERS and (not name or name.endswith("ForConditionalGeneration")):
        raise ValueError(
            f"the model '{model}' is of the family {config.model_type}, which has no text-only language model, and of "
            f"those that read images only {', '.join(READERS)} are supported; choose another model (key {key})"
        )
    text = config.get_text_config()
    if text.model_type in RANDOM_ROUTES:
        raise ValueError(
            f"the model '{model}' is of the family {text.model_type}, which draws experts at random in training, so it "
            f"would not be trained as it sampled; choose another model (key {key})"
        )
    changed = [name for name, value in AS_PROJECTED.items() if getattr(text, name, value) not in (value, None)]
    if changed:
        raise ValueError(
            f"the model '{model}' changes its logits after the projections ({', '.join(changed)} in its "
            f"config), which is not supported; choose another model (key {key})"
        )


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that makes models of this configuration."""
    return AutoModelForImageTextToText if config.model_type in READERS else AutoModelForCausalLM


def why_unshared(config: PreTrainedConfig) -> str:
    """Return why models of this configuration must read rows side by side; empty if they can read a prefix tree."""
    text = config.get_text_config()
    if text.model_type not in SHARING | SHARING_WITH_IMAGES:
        return f"the family {text.model_type}, with which it was not tested"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - LAYERS)
    return f"layers of the kind {', '.join(others)}" if others else ""


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Set rates of dropout and router jitter to 0, in place and also in nested configurations; return the given one.

    A policy must be trained as it sampled: with noise its ratio to itself would not be 1, and rows that share a prefix
    would share the noise.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return config
