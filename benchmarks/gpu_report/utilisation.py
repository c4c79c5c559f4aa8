"""Model FLOP utilisation of an update: operations that the model needs, over those that the device could do meanwhile.

    python -m benchmarks.gpu_report.utilisation --model demo --device cuda --precision bf16

Every turn is computed from its first token here, so that nothing is saved by sharing; nothing is recomputed. What the
device could do is a large matrix product of the same precision, measured here, and the number of its data sheet where
that is known.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.speed.comparisons import OUR_TOKENS, ROW_APART
from benchmarks.speed.contender import Contender
from benchmarks.speed.job import Job
from lightning_agentrl.models.demo import demo_model_folder

# Dense products in bfloat16, in TFLOP/s; the longest name that fits counts.
DATA_SHEET = {
    "A100": 312, "A40": 150, "L40S": 362, "H100 PCIe": 756, "H100": 989, "H200": 989, "B200": 2250,
}  # fmt: skip
PRODUCT = {"cpu": 2048, "cuda": 8192}  # width of the matrices
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Sizes:
    """What decides about the operations of a model.

    Args:
        linear: weights of its linear layers without the output head.
        head: weights of the output head.
        attention: layers times heads times their width.
    """

    linear: int
    head: int
    attention: int


def sizes_of(model: str) -> Sizes:
    """Count without making any weight."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    head = lm.get_output_embeddings().weight
    linear = sum(m.weight.numel() for m in lm.modules() if isinstance(m, torch.nn.Linear) and m.weight is not head)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Sizes(linear, head.numel(), config.num_hidden_layers * config.num_attention_heads * width)


def step_flops(sizes: Sizes, rows: int, tokens: int, scored: int) -> int:
    """Operations of forward and backward pass; a product and a sum are two, a backward pass is two forward ones.

    Args:
        sizes: of the model.
        rows: of the mini-batch.
        tokens: of a row that are read, each of which attends to itself and to those before it.
        scored: positions of a row that are projected on the vocabulary.
    """
    pairs = tokens * (tokens + 1) // 2
    return 3 * rows * (2 * sizes.linear * tokens + 2 * sizes.head * scored + 4 * sizes.attention * pairs)


def measured_rate(device: str, dtype: torch.dtype, repeats: int = 10) -> float:
    """Operations a second of the best of some large matrix products."""
    width = PRODUCT[device]
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * width**3 / min(seconds)


def sheet_rate(device: str, precision: str) -> float | None:
    """Operations a second by the data sheet, for bfloat16 on GPUs that are known here."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    known = [key for key in DATA_SHEET if key in name]
    return 1e12 * DATA_SHEET[max(known, key=len)] if known and precision == "bf16" else None


def measure(model: str, device: str, precision: str, turns: int, repeats: int) -> dict[str, Any]:
    """The fastest of some steps."""
    rate, case = measured_rate(device, DTYPES[precision]), ROW_APART
    job = Job(case, turns, model, precision, micro_batch=OUR_TOKENS[device], device=device)
    with Contender("ours", job) as ours:
        ours.step()  # warms up
        seconds = min(ours.step().seconds for _ in range(repeats))
    flops = step_flops(sizes_of(model), turns, case.prompt + case.reply - 1, case.reply)
    sheet = sheet_rate(device, precision)
    return {
        "seconds": seconds,
        "flops": flops,
        "product_rate": rate,
        "of_product": flops / seconds / rate,
        "of_sheet": None if sheet is None else flops / seconds / sheet,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", choices=tuple(OUR_TOKENS), default="cpu")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--turns", type=int, default=128, help="of a step")
    parser.add_argument("--repeats", type=int, default=5)
    wanted = parser.parse_args()
    model = str(demo_model_folder()) if wanted.model == "demo" else wanted.model
    print(json.dumps(measure(model, wanted.device, wanted.precision, wanted.turns, wanted.repeats)))


if __name__ == "__main__":
    main()
