"""Peak memory of an update against the length of prompts, and what `--dry-run` foretells against what a run takes.

    .venv/bin/python benchmarks/speed/memory.py          # about ten minutes on two cores

Every number comes from a process of its own. Writes a section of `docs/results/speed.md`,
`memory.png` and `memory.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.pages import put
from benchmarks.speed.contender import Contender
from benchmarks.speed.job import Job
from benchmarks.speed.layouts import Case
from benchmarks.speed.plans import PLANS, measure_plan
from lightning_agentrl.models.demo import demo_model_folder

ROOT = Path(__file__).resolve().parents[2]

PROMPTS = (64, 128, 256, 512, 1024)
OWN, REPLY = 16, 8
TURNS, TURNS_PER_PASS = 16, 8  # as many turns in a pass on both sides: a budget of tokens would hide the difference
NAMES = {"ours": "lightning-agentrl, prefix shared", "plain": "plain transformers"}
TEXT = """\
## Memory of an update

Peak memory of an optimizer step on {turns} turns, {per_pass} turns in each pass: weights, gradients and optimizer state
are included, the program is not. Prompts share all but {own} tokens, and replies have {reply} tokens;
SmolLM2-135M-Instruct in bf16 autocast. Written by `benchmarks/speed/memory.py`.

![peak memory against prompt length](memory.png)

{table}

The largest tensor of logits has {reads} positions, for every length of prompts.

### Compare `--dry-run` with the run

{plans}

The peaks are those of whole processes: program, models, sampling and update. `--dry-run` assumes full micro-batches and
replies of full length, so a run with fewer tokens needs less: a step of the quickstart has some 1,100 tokens and never
fills 4,096. If a step has several micro-batches, `--dry-run` on a CPU adds half of the activations for fragmentation.
Measured fragmentation was a quarter to three quarters of the activations.
"""


def measure(module: str, prompt: int, model: str) -> dict[str, int]:
    """Bytes after the second step; the first one makes the optimizer's state only at its end."""
    case = Case(prompt=prompt, shared=prompt - OWN, reply=REPLY)
    row = prompt + REPLY - 1  # the last token of a reply is not read
    tokens = {"plain": row * TURNS_PER_PASS, "ours": case.shared + (row - case.shared) * TURNS_PER_PASS}
    job = Job(case, TURNS, model, precision="bf16", micro_batch=tokens[module], variant="logits")
    with Contender(module, job) as contender:
        contender.step()
        step = contender.step()
    return {"peak_bytes": step.peak_bytes, "largest_logits": step.largest_logits}


def plot(results: dict[str, dict[str, dict[str, int]]], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4))
    for module, by_prompt in results.items():
        prompts = [int(prompt) for prompt in by_prompt]
        gib = [numbers["peak_bytes"] / 2**30 for numbers in by_prompt.values()]
        axes.plot(prompts, gib, marker="o", label=NAMES[module])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of a prompt")
    axes.set_ylabel("peak memory of an update, GiB")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def prompts_table(results: dict[str, dict[str, dict[str, int]]]) -> str:
    head = ["prompt tokens", *(f"{NAMES[m]}: peak, GiB" for m in results), *(f"{m}: logits, MiB" for m in results)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for prompt in map(str, PROMPTS):
        peaks = [f"{by_prompt[prompt]['peak_bytes'] / 2**30:.2f}" for by_prompt in results.values()]
        logits = [f"{by_prompt[prompt]['largest_logits'] / 2**20:.1f}" for by_prompt in results.values()]
        lines.append(f"| {' | '.join([prompt, *peaks, *logits])} |")
    return "\n".join(lines)


def plans_table(plans: dict[str, dict[str, float]]) -> str:
    lines = ["| setting | predicted, GiB | measured, GiB | measured / predicted |", "|---|---|---|---|"]
    for name, numbers in plans.items():
        predicted, taken = numbers["foretold"], numbers["measured"]
        lines.append(f"| {name} | {predicted / 2**30:.2f} | {taken / 2**30:.2f} | {taken / predicted:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder of the page and the plot")
    parser.add_argument("--plans", action="store_true", help="only the second part; the first one stays as it is")
    wanted = parser.parse_args()
    model = str(demo_model_folder())
    results: dict[str, dict[str, dict[str, int]]] = {}
    if wanted.plans:
        results = json.loads((wanted.out / "memory.json").read_text())["prompts"]
    for module in () if wanted.plans else NAMES:
        results[module] = {}
        for prompt in PROMPTS:
            results[module][str(prompt)] = measure(module, prompt, model)
            print(module, prompt, results[module][str(prompt)], flush=True)
    plans: dict[str, Any] = {}
    for name, options in PLANS.items():
        plans[name] = measure_plan(options)
        print(name, plans[name], flush=True)
    wanted.out.mkdir(parents=True, exist_ok=True)
    (wanted.out / "memory.json").write_text(json.dumps({"prompts": results, "plans": plans}, indent=2) + "\n")
    plot(results, wanted.out / "memory.png")
    text = TEXT.format(
        turns=TURNS,
        per_pass=TURNS_PER_PASS,
        own=OWN,
        reply=REPLY,
        reads=TURNS_PER_PASS * REPLY,
        table=prompts_table(results),
        plans=plans_table(plans),
    )
    put(wanted.out / "speed.md", "memory", text)
    print(text)


if __name__ == "__main__":
    main()
