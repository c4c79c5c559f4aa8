"""What the shipped configs for GPUs need, counted from the sizes of their models: the numbers in their heads.

    .venv/bin/python benchmarks/counted_memory.py

Weights, gradients and Adam state of actor and critic and the weights of the reference are in float32. Autocast keeps a
copy in bfloat16 of each trained weight that it multiplies by; under FSDP2 layers are gathered in bfloat16 instead, one
at a time. With gradient checkpointing, activations are the inputs of all layers, what one layer keeps, and one chunk of
logits. A gigabyte is 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightning_agentrl.models.language_model import LOGITS_PER_CHUNK

GB = 1e9
SIZES = {  # of Qwen2.5-Instruct, as in the config.json of each
    "0.5B": Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "3B": Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "7B": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """Parameters of a model.

    Args:
        all: of the policy.
        backbone: of a critic, which has no output head of its own.
        cast: of the weights of linear layers of policy and critic.
    """

    all: int
    backbone: int
    cast: int


def count(config: Qwen2Config) -> Counted:
    """Count without making any weight."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    linear = {id(m.weight): m.weight for m in lm.modules() if isinstance(m, torch.nn.Linear)}
    head = lm.get_output_embeddings().weight.numel()
    every = sum(p.numel() for p in lm.parameters())
    cast = sum(weight.numel() for weight in linear.values())
    return Counted(every, every - (0 if config.tie_word_embeddings else head), 2 * cast - head)


def activations(config: Qwen2Config, tokens: int) -> float:
    """Return bytes of a micro-batch with gradient checkpointing."""
    hidden, wide = config.hidden_size, config.intermediate_size
    kv = hidden * config.num_key_value_heads // config.num_attention_heads
    layer = 2 * (2 * 4 * hidden + 2 * hidden) + 2 * (2 * hidden + 2 * kv) + 2 * 4 * wide  # norms, attention, MLP
    logits = LOGITS_PER_CHUNK * config.vocab_size * (2 + 4 * 4)  # as they come, and what log-probs and entropy keep
    return tokens * (4 * hidden * config.num_hidden_layers + layer) + logits


def main() -> None:
    """Print a line for each config."""
    for size, tokens, processes in (("0.5B", 16384, 1), ("3B", 16384, 1), ("3B", 16384, 4), ("7B", 16384, 8)):
        config = SIZES[size]
        counted = count(config)
        trained = counted.all + counted.backbone
        state = (16 * trained + 4 * counted.all) / processes
        parts = {"weights, gradients, Adam, reference": state}
        if processes == 1:
            parts["copies of autocast"] = 2 * counted.cast
        else:
            parts["policy while it samples"] = 2 * counted.all
        parts["activations"] = activations(config, tokens)
        host = 4 * counted.all * processes
        told = ", ".join(f"{name} {x / GB:.1f}" for name, x in parts.items())
        print(f"{size} on {processes}: {told}; read into main memory {host / GB:.0f} GB")


if __name__ == "__main__":
    main()
