"""What each strategy needs on each GPU, counted from the sizes of models: the table of docs/many_devices.md.

    .venv/bin/python -m benchmarks.counted_memory

It is the memory plan of `agentrl fit --dry-run` with bf16-mixed, gradient checkpointing, a critic and a reference of
their own and micro-batches of 16384 tokens, in which 1024 or more are replied; with adapters of 8192, and sampled by
vLLM. A gigabyte is 10^9 bytes.
"""

from __future__ import annotations

from functools import cache

import torch

from lightning_agentrl.agents.models import Compute, Models, build_models
from lightning_agentrl.commands.memory import GPUS, ROOM, MemoryPlan, Place, Sharing, Step, memory_plan
from lightning_agentrl.engines import EngineMemory
from lightning_agentrl.models.critic import SeparateCritic
from lightning_agentrl.models.lora import LoRA
from lightning_agentrl.models.shapes import empty_causal_lm

GB = 1e9
CASES = (("0.5B", 1), ("3B", 1), ("3B", 4), ("7B", 1), ("7B", 8), ("7B", 16))  # models, GPUs
STRATEGIES: dict[str, Sharing] = {"one process, or ddp": "ddp", "FSDP2": "fsdp2", "ZeRO 1": "zero1", "ZeRO 2": "zero2"}
COMPUTE = Compute(gradient_checkpointing=True, kernels="torch")
STEP = Step(micro_batches=2, tokens=16384, reads=4096, total=32768)
ADAPTERS, ADAPTERS_STEP = LoRA(rank=32), Step(micro_batches=4, tokens=8192, reads=2048, total=32768)


@cache
def models(size: str, rounded: bool, lora: LoRA | None = None) -> Models:
    """Return models without weights; a reference that is not sharded, or the base of adapters, is rounded."""
    name = f"Qwen/Qwen2.5-{size}-Instruct"
    with torch.device("meta"):
        precision = "bf16-mixed" if rounded else None
        return build_models(name, SeparateCritic(), name, lora, COMPUTE, precision, None, load=empty_causal_lm)


def plan(size: str, gpus: int, strategy: str, lora: LoRA | None = None) -> MemoryPlan:
    """Return the plan of one process, without an engine of vLLM; with adapters, of a run that vLLM samples for."""
    sharing = STRATEGIES[strategy] if gpus > 1 else ""
    place = Place(True, gpus, -(-gpus // 8), sharing, "bf16-mixed")
    step = STEP if lora is None else ADAPTERS_STEP
    own = models(size, lora is not None or sharing != "fsdp2", lora)
    return memory_plan(own, COMPUTE, place, step, EngineMemory(), sends_layers=lora is not None)


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
    for size in ("14B", "32B"):
        cells = [cell(plan(size, 8, s, ADAPTERS).peak / GB) for s in list(STRATEGIES)[:2]]
        host = 32 * sum(p.numel() for p in models(size, True).actor.parameters())
        lines.append(f"| {size} with adapters, 8 | " + " | ".join(cells) + f" |  |  | {host / GB:.0f} |")
    return lines


def main() -> None:
    print("\n".join(table()))


if __name__ == "__main__":
    main()
