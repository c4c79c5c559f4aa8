"""Throughput, model FLOP utilization (MFU) and the gain of shared prefixes of our updates, in one process.

    python -m benchmarks.speed.utilisation --model FOLDER --device cuda --kernels compiled --tokens 16384 --turns 240

Three layouts: rows of 260 prompt tokens that share nothing, the same rows with 200 tokens shared, and one long row.
MFU divides the operations that the model needs by those of the data sheet, or on a CPU by those of a large matrix
product. Recomputed operations do not count, shared tokens count once. If activations do not fit, the layout is measured
with gradient checkpointing and says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import lightning as L
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.speed.comparisons import LONG, LONG_APART
from benchmarks.speed.job import Job
from benchmarks.speed.layouts import Case
from benchmarks.speed.ours import GivenData, PolicyAgent, make_trainer, rollout_of

# Dense products in bfloat16, in TFLOP/s; the longest name that fits counts.
DATA_SHEET = {
    "A100": 312, "A40": 150, "L40S": 362, "H100 PCIe": 756, "H100": 989, "H200": 989, "B200": 2250,
}  # fmt: skip
WARM = 2  # steps that do not count: kernels are compiled, memory is allocated


@dataclass(frozen=True)
class Sizes:
    """The weights that decide how many operations a model needs.

    Args:
        linear: of its linear layers without the output head.
        head: of the output head.
        last: of the last feed-forward network, which reads logit positions only.
        attention: layers times heads times their width.
    """

    linear: int
    head: int
    last: int
    attention: int


def sizes_of(model: str) -> Sizes:
    """Count without making any weight."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    head = lm.get_output_embeddings().weight

    def linear(module: torch.nn.Module) -> int:
        layers = (m for m in module.modules() if isinstance(m, torch.nn.Linear))
        return sum(m.weight.numel() for m in layers if m.weight is not head)

    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_hidden_layers * config.num_attention_heads * width
    return Sizes(linear(lm), head.numel(), linear(lm.model.layers[-1].mlp), heads)


def step_flops(sizes: Sizes, case: Case, rows: int, frozen: bool = False) -> int:
    """Operations of a forward and a backward pass; a multiply-add is two, a backward pass is two forward ones.

    Args:
        sizes: of the model.
        case: of the rows.
        rows: of the step, all in one micro-batch if they share anything.
        frozen: linear layers get no gradients of their weights, as below adapters, whose operations do not count.
    """
    length, shared = case.prompt + case.reply - 1, case.shared  # the last token of a reply is not read
    tokens, scored = shared + rows * (length - shared), rows * case.reply
    pairs = shared * (shared + 1) // 2 + rows * (length * (length + 1) - shared * (shared + 1)) // 2
    products = sizes.linear * tokens - sizes.last * (tokens - scored) + sizes.head * scored
    return (2 if frozen else 3) * 2 * products + 3 * 4 * sizes.attention * pairs


def device_rate(device: str) -> tuple[float, str]:
    """Operations a second in bfloat16, and where the number is from."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    if known := [key for key in DATA_SHEET if key in name]:
        return 1e12 * DATA_SHEET[max(known, key=len)], "data sheet"
    width, seconds = (8192 if device == "cuda" else 1024), []
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        started = time.perf_counter()
        float((a @ b)[0, 0])
        seconds.append(time.perf_counter() - started)
    return 2 * width**3 / min(seconds), "a large product"


class Timed(L.Callback):
    """The seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self._started = _now(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        self.seconds.append(_now(trainer) - self._started)


def _now(trainer: L.Trainer) -> float:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of_steps(job: Job, repeats: int) -> list[float]:
    timed = Timed()
    trainer = make_trainer(job, timed, max_epochs=WARM + repeats)
    trainer.fit(PolicyAgent(job), GivenData(rollout_of(job.rows())))
    return timed.seconds


def measure(job: Job, repeats: int) -> dict[str, Any]:
    """Median seconds of a step and the peak memory of tensors, with gradient checkpointing if it does not fit."""
    gc.collect()  # of the measurement before
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        seconds = seconds_of_steps(job, repeats)
    except torch.OutOfMemoryError:
        if job.checkpointing:
            raise
    else:
        peak = torch.cuda.max_memory_allocated() / 2**30 if job.device == "cuda" else None
        found = {"seconds": median(seconds[WARM:]), "seconds of the first step": seconds[0], "peak GiB": peak}
        return found | ({"gradient checkpointing": "on"} if job.checkpointing else {})
    return measure(replace(job, checkpointing=True), repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", choices=("torch", "compiled", "liger"), default="torch")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--turns", type=int, default=240, help="of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    wanted = parser.parse_args()
    rate, of = device_rate(wanted.device)
    sizes = sizes_of(wanted.model)
    half = wanted.tokens // 2
    cases = {"apart": (LONG_APART, wanted.turns), "shared": (LONG, wanted.turns), "one row": (Case(half, 0, half), 1)}
    found: dict[str, Any] = {f"TFLOP/s of {of}": rate / 1e12}
    settings: dict[str, Any] = {"variant": wanted.kernels, "device": wanted.device, "lora": wanted.lora}
    for name, (case, turns) in cases.items():
        one = measure(Job(case, turns, wanted.model, "bf16", wanted.tokens, **settings), wanted.repeats)
        settings["checkpointing"] = "gradient checkpointing" in one  # the others as well, to be compared
        raw = turns * (case.prompt + case.reply - 1)
        flops = step_flops(sizes, case, turns, wanted.lora)
        one |= {"tokens/s": raw / one["seconds"], "MFU": flops / one["seconds"] / rate}
        if case.shared:
            one["times as fast as apart"] = found["apart"]["seconds"] / one["seconds"]
            unique = raw - (turns - 1) * case.shared
            one["of raw over unique tokens"] = one["times as fast as apart"] / (raw / unique)
        found[name] = one
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
