"""What each strategy needs on each GPU, counted from the sizes of models: the table of docs/many_devices.md.

    .venv/bin/python -m benchmarks.counted_memory

It is the plan of `agentrl fit --dry-run`, with activations that are counted and not measured. Weights, gradients and
Adam state of actor and critic are in float32, and of the reference what its linear layers do not hold in bfloat16.
Autocast keeps a copy in bfloat16 of each trained weight that it multiplies by; under FSDP2 the reference is in float32
too, and layers are gathered in bfloat16 instead, one at a time. With
gradient checkpointing, activations are the inputs of all layers, what one layer keeps, and one chunk of logits. A
gigabyte is 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightning_agentrl.commands.memory import MemoryPlan, trained_state
from lightning_agentrl.models.language_model import LOGITS_PER_CHUNK

GB = 1e9
GPUS = (24, 48, 80, 141)  # gigabytes of common ones
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
        rounded: of those of a reference, which has no head of its own where that is tied to the embedding.
    """

    all: int
    backbone: int
    cast: int
    rounded: int


@cache
def count(size: str) -> Counted:
    """Count without making any weight."""
    config = SIZES[size]
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    linear = {id(m.weight): m.weight for m in lm.modules() if isinstance(m, torch.nn.Linear)}
    head = lm.get_output_embeddings().weight.numel()
    every = sum(p.numel() for p in lm.parameters())
    cast = sum(weight.numel() for weight in linear.values())
    own_head, rounded = (0, cast - head) if config.tie_word_embeddings else (head, cast)
    return Counted(every, every - own_head, 2 * cast - head, rounded)


def activations(config: Qwen2Config, tokens: int) -> float:
    """Return bytes of a micro-batch with gradient checkpointing."""
    hidden, wide = config.hidden_size, config.intermediate_size
    kv = hidden * config.num_key_value_heads // config.num_attention_heads
    layer = 2 * (2 * 4 * hidden + 2 * hidden) + 2 * (2 * hidden + 2 * kv) + 2 * 4 * wide  # norms, attention, MLP
    logits = LOGITS_PER_CHUNK * config.vocab_size * (2 + 4 * 4)  # as they come, and what log-probs and entropy keep
    return tokens * (4 * hidden * config.num_hidden_layers + layer) + logits


CASES = (("0.5B", 1), ("3B", 1), ("3B", 4), ("7B", 1), ("7B", 8), ("7B", 16))  # models, GPUs
STRATEGIES = ("one process, or ddp", "FSDP2", "ZeRO 1", "ZeRO 2")


def plan(size: str, gpus: int, strategy: str, tokens: int = 16384) -> MemoryPlan:
    """Return the plan of one process with bf16-mixed, an own critic and a reference, without an engine of vLLM."""
    counted, shards = count(size), gpus if strategy == "FSDP2" else 1
    trained = 4 * (counted.all + counted.backbone) // shards
    gradients, optimizer = trained_state(trained, int(strategy[-1]) if "ZeRO" in strategy else 0, gpus)
    copied = 0 if strategy == "FSDP2" else 2 * counted.cast
    return MemoryPlan(
        program=0,
        weights=trained + (4 * counted.all // shards if strategy == "FSDP2" else 4 * counted.all - 2 * counted.rounded),
        gradients=gradients * (2 if strategy.endswith("ddp") and gpus > 1 else 1),  # in buckets too
        optimizer=optimizer,
        activations=int(activations(SIZES[size], tokens)) + copied,
        holes=0,
        engine=0,
        sampling=2 * counted.all if shards > 1 else 0,  # the policy in bfloat16
    )


def cell(needed: float) -> str:
    """Return the gigabytes that are needed, and the smallest GPU that has a twentieth more."""
    fits = next((gpu for gpu in GPUS if needed * 1.05 <= gpu), None)
    return f"{needed:.0f} (GPU of {fits})" if fits else f"{needed:.0f}"


def table() -> list[str]:
    """Return the lines of the table, in gigabytes."""
    lines = [
        "| model, GPUs | " + " | ".join(STRATEGIES) + " | main memory of a node |",
        "|---|" + "---|" * (len(STRATEGIES) + 1),
    ]
    for size, gpus in CASES:
        own = [s for s in STRATEGIES if gpus > 1 or s == STRATEGIES[0]]
        cells = [cell(plan(size, gpus, s).peak / GB) if s in own else "" for s in STRATEGIES]
        host = 4 * count(size).all * min(gpus, 8)
        lines.append(f"| {size}, {gpus} | " + " | ".join(cells) + f" | {host / GB:.0f} |")
    return lines


def main() -> None:
    print("\n".join(table()))


if __name__ == "__main__":
    main()
