"""What each strategy needs on each GPU, counted from the sizes of models: the table of docs/many_devices.md.

    .venv/bin/python -m benchmarks.counted_memory

It is the memory plan of `agentrl fit --dry-run` with bf16-mixed, gradient checkpointing, a critic and a reference of
their own and micro-batches of 16384 tokens, in which 1024 or more are replied. A gigabyte is 10^9 bytes.
"""

from __future__ import annotations

from functools import cache

import torch

from lightning_agentrl.agents.models import Compute, Models, build_models
from lightning_agentrl.commands.memory import GPUS, ROOM, MemoryPlan, Place, Sharing, Step, memory_plan
from lightning_agentrl.engines import EngineMemory
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.shapes import empty_causal_lm

GB = 1e9
CASES = (("0.5B", 1), ("3B", 1), ("3B", 4), ("7B", 1), ("7B", 8), ("7B", 16))  # models, GPUs
STRATEGIES: dict[str, Sharing] = {"one process, or ddp": "ddp", "FSDP2": "fsdp2", "ZeRO 1": "zero1", "ZeRO 2": "zero2"}
COMPUTE = Compute(gradient_checkpointing=True, kernels="torch")
STEP = Step(micro_batches=2, tokens=16384, reads=4096, total=32768)


@cache
def models(size: str, rounded: bool) -> Models:
    """Return models without weights; a reference that is not sharded is rounded."""
    name = f"Qwen/Qwen2.5-{size}-Instruct"
    with torch.device("meta"):
        precision = "bf16-mixed" if rounded else None
        return build_models(name, SeparateCritic(), name, None, COMPUTE, precision, None, load=empty_causal_lm)


def plan(size: str, gpus: int, strategy: str) -> MemoryPlan:
    """Return the plan of one process, without an engine of vLLM."""
    sharing = STRATEGIES[strategy] if gpus > 1 else ""
    place = Place(True, gpus, -(-gpus // 8), sharing, "bf16-mixed")
    return memory_plan(models(size, sharing != "fsdp2"), COMPUTE, place, STEP, EngineMemory())


def cell(needed: float) -> str:
    """Return the gigabytes that are needed, and the smallest GPU that has a twentieth more."""
    fits = next((gpu for gpu in GPUS if needed * ROOM <= gpu), None)
    return f"{needed:.0f} (GPU of {fits})" if fits else f"{needed:.0f}"


def table() -> list[str]:
    """Return the lines of the table, in gigabytes."""
    lines = [
        "| model, GPUs | " + " | ".join(STRATEGIES) + " | main memory of a node |",
        "|---|" + "---|" * (len(STRATEGIES) + 1),
    ]
    first = next(iter(STRATEGIES))
    for size, gpus in CASES:
        cells = [cell(plan(size, gpus, s).peak / GB) if gpus > 1 or s == first else "" for s in STRATEGIES]
        host = 4 * sum(p.numel() for p in models(size, True).actor.parameters()) * min(gpus, 8)
        lines.append(f"| {size}, {gpus} | " + " | ".join(cells) + f" | {host / GB:.0f} |")
    return lines


def main() -> None:
    print("\n".join(table()))


if __name__ == "__main__":
    main()
