"""Families of models: which are taken, and which can read several rows as one prefix tree.

A family can if its attention hands the tree on, with its windows, and nothing else in it looks along the row: no state,
no local mixing of neighbours, no positions or biases made from the place in the row. That cannot be read off a config,
so the list below is of those that were tried; all others read their rows beside each other.
"""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Each is compared with rows by themselves in tests/models/test_families.py, with windows where the family has them.
SHARING = frozenset(
    {
        *("apertus", "arcee", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo"),
        *("gemma", "gemma3_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox"),
        *("granite", "granitemoe", "helium", "hunyuan_v1_dense", "jais2", "llama", "ministral", "ministral3"),
        *("minimax_m2", "mistral", "mixtral", "modernbert-decoder", "olmo", "olmo2", "olmo3", "olmoe"),
        *("opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "starcoder2"),
    }
)
LAYERS = {"full_attention", "sliding_attention"}
AS_PROJECTED = {  # values with which logits are what the vocabulary projection gives, and scores plain products
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}


def check_family(model: str, config: PreTrainedConfig) -> None:
    """Refuse families that are no language models of text, or change their logits after the projection.

    Raises:
        ValueError: one sentence with the key to change.
    """
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    if not name or name.endswith("ForConditionalGeneration"):
        raise ValueError(
            f"the model '{model}' is of the family {config.model_type}, which has no language model of text alone; "
            "choose another model (key model.init_args.model)"
        )
    changed = [name for name, value in AS_PROJECTED.items() if getattr(config, name, value) not in (value, None)]
    if changed:
        raise ValueError(
            f"the model '{model}' changes its logits after the projections ({', '.join(changed)} in its "
            "config), which is not supported; choose another model (key model.init_args.model)"
        )


def why_unshared(config: PreTrainedConfig) -> str:
    """Why models of this configuration read rows beside each other; empty if they can read a prefix tree."""
    text = config.get_text_config()
    if text.model_type not in SHARING:
        return f"the family {text.model_type}, with which it was not tried"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - LAYERS)
    return f"layers of the kind {', '.join(others)}" if others else ""


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration with every rate of dropout at 0, changed in place.

    A policy is trained as it sampled: with dropout its ratio to itself would not be 1, and rows of one prefix would all
    drop the same of it.
    """
    text = config.get_text_config()
    for name, value in list(vars(text).items()):
        if "drop" in name and isinstance(value, float):
            setattr(text, name, 0.0)
    return config
