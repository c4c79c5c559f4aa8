"""What `agentrl serve` adds to vLLM's workers. Imports nothing, as every worker loads it."""

from __future__ import annotations

from typing import Any

EXTENSION = f"{__name__}.TellsSizes"
RECEIVER = "lightning_agentrl.vllm_worker.receiver.ReceivesWeights"  # instead, where weights come over the network
FORGET_TRAINER = "forget_trainer"  # its method
SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
)


class TellsSizes:
    """A mixin of vLLM's worker."""

    def policy_sizes(self) -> dict[str, Any]:
        """Of the model that it runs; vLLM itself would cut larger weights to its own sizes without a word."""
        return sizes_of(self.model_config.hf_text_config)  # type: ignore[attr-defined]


def sizes_of(config: Any) -> dict[str, Any]:
    """What of a transformers configuration decides how its weights are used."""
    sizes = {name: getattr(config, name, None) for name in SIZES}
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    return {name: size for name, size in {**sizes, "rope_theta": theta}.items() if size is not None}
