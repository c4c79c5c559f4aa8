"""The extension of vLLM's workers by `agentrl serve`. It imports nothing heavy, since every worker loads it."""

from __future__ import annotations

from typing import Any

EXTENSION = f"{__name__}.TellsSizes"
RECEIVER = "lightning_agentrl.vllm_worker.receiver.ReceivesWeights"  # instead, if weights are sent over the network
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
    """A mixin of vLLM's worker that reports the sizes of its model."""

    def policy_sizes(self) -> dict[str, Any]:
        """Return the sizes of the model that it runs; vLLM would silently truncate larger weights to them."""
        return sizes_of(self.model_config.hf_text_config)  # type: ignore[attr-defined]


def sizes_of(config: Any) -> dict[str, Any]:
    """Return the entries of a transformers configuration that determine how its weights are used."""
    sizes = {name: getattr(config, name, None) for name in SIZES}
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    return {name: size for name, size in {**sizes, "rope_theta": theta}.items() if size is not None}
