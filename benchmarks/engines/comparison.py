"""Which wrong engines EngineCheck finds at the start of a run, in float32 and in bfloat16, and what it takes.

    python benchmarks/engines/comparison.py   # two minutes on one core; writes a section of docs/results/vllm.md

The engines and the tiny random models are those of tests/agents/test_engine_comparison.py: 27 wrong ones, and all right
ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pages import RESULTS, put
from lightning_agentrl.engines import Engine
from lightning_agentrl.tools.engine_causes import likely_cause
from tests.agents.test_engine_comparison import RIGHT, WRONG, comparing, model


def shown(kind: str, make: Callable[[PreTrainedModel], Engine], dtype: torch.dtype) -> tuple[str, str, float]:
    """The cause, the larger mean mismatch of both rounds, and their seconds."""
    lm = model(kind).to(dtype)
    with comparing(make(lm), lm, trained_meanwhile=kind.endswith("ahead")) as comparison:
        started = time.perf_counter()
        rounds = list(comparison.rounds(2, 0))
        seconds = time.perf_counter() - started
        wrong = next((found for found in rounds if not found.seen.fits), None)
        cause = "not found" if wrong is None else likely_cause(comparison, rounds, wrong)
    return cause, f"{max(found.seen.mean for found in rounds):.2g}", seconds


def main() -> None:
    torch.set_num_threads(1)
    lines, found, took = [], {torch.float32: 0, torch.bfloat16: 0}, []
    for name, (kind, make, _) in WRONG.items():
        cells = []
        for dtype in found:
            cause, gap, seconds = shown(kind, make, dtype)
            if name == "lower precision" and dtype == torch.bfloat16:
                cause = "no fault: both use bfloat16"
            found[dtype] += cause not in ("not found", "no fault: both use bfloat16")
            took.append(seconds)
            cells += [gap, cause]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    right = []
    for name, (kind, make_right, settings) in RIGHT.items():
        with comparing(make_right(), model(kind), **settings) as comparison:
            rounds = list(comparison.rounds(2, 0))
            fits = all(found.seen.fits for found in rounds)
            right.append(
                f"| {name} | {max(r.seen.mean for r in rounds):.2g} | {max(r.seen.largest for r in rounds):.2g} |"
            )
            assert fits, name
    put(
        RESULTS / "vllm.md",
        "engine_check",
        PAGE_TEXT.format(
            count=len(WRONG),
            exact=found[torch.float32],
            rough=found[torch.bfloat16],
            table="\n".join(lines),
            right_count=len(right),
            right="\n".join(right),
            seconds=statistics.median(took),
        ),
    )


PAGE_TEXT = """## What EngineCheck finds

`python benchmarks/engines/comparison.py` gives {count} wrong engines to the
[comparison at the start of a run](../troubleshooting.md#the-engine-check), with tiny random models in float32 and in
bfloat16 on both sides, and {right_count} correct ones. In float32 it finds {exact} of {count}, in bfloat16 {rough}; it
accepts all correct ones. *Withheld*: not sent to the engine. The mean mismatch is that of the worse of two rounds, the
causes are those of `agentrl verify-engine`. Two rounds took {seconds:.1f} seconds (median), one reply at a time.

| wrong engine | float32: mean mismatch | found, with the cause | bfloat16: mean mismatch | found, with the cause |
|---|---|---|---|---|
{table}

### Correct engines

| engine | mean mismatch | largest mismatch |
|---|---|---|
{right}
"""

if __name__ == "__main__":
    main()
