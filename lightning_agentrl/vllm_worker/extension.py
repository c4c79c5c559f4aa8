"""Worker extension that `agentrl serve` adds to vLLM. This module imports only torch, since every worker loads it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import torch

MODE = "processed_logprobs"  # log-probs of the distribution that is sampled from, after temperature
CPU_BLOCK = 32  # tokens per block of the prefix cache; vLLM's default on a CPU, 128, exceeds most common prefixes
CPU_OPS = {"custom_ops": ["-rotary_embedding"]}  # vLLM 0.32's own operation misreads queries with a dimension for heads
EXTENSION = f"{__name__}.WorkerExtension"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtype by size in bytes
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


class WorkerExtension:
    """Mixin for vLLM's worker with the methods that the trainer calls besides sampling."""

    def policy_sizes(self) -> dict[str, Any]:
        """Return the sizes of the running model; vLLM would silently truncate larger weights."""
        return sizes_of(self.model_config.hf_text_config)  # type: ignore[attr-defined]

    def pack_experts(self) -> None:
        """Pack the weights of experts for a CPU, once after all weights were loaded.

        vLLM 0.32 does this when it starts but not when it reloads weights (`UnquantizedFusedMoEMethod._setup_kernel`),
        so without this call, vLLM would read the new weights in the wrong order.
        """
        for module in self.get_model().modules():  # type: ignore[attr-defined]
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and module.w13_weight.device.type == "cpu":
                kernel.fused_experts.process_weights_after_loading(module)

    def weights_checksum(self) -> tuple[str, str]:
        """Return digests of the layout and of the contents of this worker's weights.

        Contents can be compared only between workers with equal layouts.
        """
        model = self.get_model()  # type: ignore[attr-defined]
        return checksum(model.named_parameters(), str(next(model.parameters()).device.type))


def checksum(weights: Iterable[tuple[str, Any]], device: str) -> tuple[str, str]:
    """Return digests of the layout and the bits of named tensors; the digest of bits depends on the order of rows."""
    layout, content = blake2b(device.encode(), digest_size=8), blake2b(digest_size=8)
    for name, weight in weights:
        layout.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if weight.numel():
            rows = weight.detach().reshape(weight.shape[0] if weight.dim() else 1, -1).contiguous()
            sums = rows.view(INTEGERS[weight.element_size()]).sum(1, dtype=torch.int64)
            content.update(sums.cpu().numpy().tobytes())
    return layout.hexdigest(), content.hexdigest()


def sizes_of(config: Any) -> dict[str, Any]:
    """Return the entries of a transformers configuration that determine how its weights are used."""
    sizes = {name: getattr(config, name, None) for name in SIZES}
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", None))
    return {name: size for name, size in {**sizes, "rope_theta": theta}.items() if size is not None}
