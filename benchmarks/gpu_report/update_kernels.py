"""Seconds of an update by the kernels of the layers, the kernel of attention and the size of a micro-batch.

    python -m benchmarks.gpu_report.update_kernels compiled --model demo --device cuda

All in one process, one setting after the other, on the turns of the comparisons of `benchmarks/speed`.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import lightning as L
import torch

from benchmarks.speed.comparisons import LONG, LONG_APART, OUR_TOKENS, SHORT
from benchmarks.speed.job import Job
from benchmarks.speed.layouts import Case
from benchmarks.speed.ours import GivenData, PolicyAgent, make_trainer, rollout_of
from lightning_agentrl.models import levels
from lightning_agentrl.models.demo import demo_model_folder

WAYS = ("torch", "compiled", "liger", "flex")  # the last: torch's kernels, and FlexAttention for every tree
WARM = 3  # steps that do not count: kernels are compiled, memory is taken


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


def measure(job: Job, repeats: int) -> dict[str, Any]:
    """Medians of one setting, and the most memory that tensors took."""
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    timed = Timed()
    trainer = make_trainer(job, timed, max_epochs=WARM + repeats)
    trainer.fit(PolicyAgent(job), GivenData(rollout_of(job.rows())))
    peak = torch.cuda.max_memory_allocated() / 2**30 if job.device == "cuda" else None
    return {"seconds": median(timed.seconds[WARM:]), "first": timed.seconds[0], "peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", choices=tuple(OUR_TOKENS), default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", help="of a micro-batch, where nothing is shared")
    parser.add_argument("--turns", type=int, default=128, help="of a step")
    parser.add_argument("--repeats", type=int, default=5)
    wanted = parser.parse_args()
    model = str(demo_model_folder()) if wanted.model == "demo" else wanted.model
    usual = OUR_TOKENS[wanted.device]
    settings: list[tuple[Case, int]] = [(LONG_APART, tokens) for tokens in wanted.tokens or (usual, 4 * usual)]
    settings += [(LONG, usual), (SHORT, usual)]
    if wanted.way == "flex":
        levels.MOST_LEVELS = -1
    found = {}
    for case, tokens in settings:
        kernels = "torch" if wanted.way == "flex" else wanted.way
        job = Job(case, wanted.turns, model, "bf16", tokens, variant=kernels, device=wanted.device)
        found[f"{case.prompt}/{case.shared} in {tokens}"] = measure(job, wanted.repeats)
        print(json.dumps({"way": wanted.way, **found}), flush=True)


if __name__ == "__main__":
    main()
