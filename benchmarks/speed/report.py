"""The page of results."""

from __future__ import annotations

import functools
import statistics
import subprocess
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from benchmarks.speed.contender import PYTHONS
from lightning_agentrl.models.demo import NAME

INTRODUCTION = """\
## Speed of an update

The table compares the seconds of one optimizer step, from the collected turns to the new weights. Replies have 8
tokens; {model}, all weights trained, {device}. Written by `make benchmarks`.

Both trainers get the same random tokens and the same advantages: no critic, no reference, one step per rollout, AdamW,
clipped gradients, equal settings of glibc's allocator, no gradient checkpointing. Each runs its own training loop. Our
micro-batches have {tokens} tokens, as {config}; those of the other trainer have the fastest of several sizes
(`benchmarks/speed/tuned.json`). The trainers take steps alternately, and a ratio compares two successive steps: above
1, lightning-agentrl is faster. The prompts of a line have one length, so there is no padding.
"""
COLUMNS = (
    "against",
    "setting",
    "their seconds",
    "our seconds",
    "their turns/s",
    "our turns/s",
    "ratio: median (range)",
    "goal",
    "gradient norms differ by",
)
NOTES = """\

* **TRL GRPO** is `GRPOTrainer`, the synchronous class, as installed. On a GPU (with Triton) it computes logits
  for completions only, on a CPU for all positions. *Projecting scored positions only* is a subclass that computes
  logits for the sampled positions only.
* **A row per episode** is TRL's own layout of a multi-turn episode: 16 rows of about 235 tokens, each with 8 replies
  and the observations between them. We train on each reply in a sample with shared tokens and its observation.
* **plain transformers** computes every turn from its first token, in rows without padding, and no entropy.
* **TRL's prefix tree**, if the table has it, is the packing and attention of its `AsyncGRPOTrainer`, which also shares
  prefixes across prompts, without a critic and for text only. Its kernel, FlashAttention 3, needs a GPU. On a CPU a
  loop over segments replaces the kernel, so its speed says nothing.
* *Our `kernels: compiled`* sets that key; its default, `auto`, does not compile on a CPU. TRL is not compiled.
* Lines differ in the version of this package and in the numbers of turns and steps. Pairs scatter by about 10 %.
* The last column is the relative difference of the gradient norms in a first step in the line's precision, and in
  float32.
"""


def markdown(results: Mapping[str, Mapping[str, Any]], packages: Mapping[str, str]) -> str:
    """The page; ratios are made from the seconds here."""
    some = next(iter(results.values()))
    lines = [line(result) for result in results.values()]
    repeats = {len(result["seconds"][0]) for result in results.values()}
    foot = f"\nMedians over {' or '.join(map(str, sorted(repeats)))} steps of each trainer, after a first step. "
    foot += ", ".join(f"{name} {version}" for name, version in packages.items()) + ".\n"
    on_gpu = some.get("device") == "cuda"
    head = INTRODUCTION.format(
        model=some.get("model", NAME),
        device="one GPU" if on_gpu else f"{some['threads']} threads on a CPU",
        config="in the configs for GPUs" if on_gpu else "in the quickstart at that time",
        tokens=some["micro_batch"][0],
    )
    head += "\n"
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *lines]
    return head + "\n".join(table) + "\n" + foot + NOTES


def summary(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a line, by name."""
    ours, theirs = result["seconds"]
    pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "against": f"{result['theirs']}, {result['turns']} turns, {result['setting']}",
        "our seconds": statistics.median(ours),
        "their seconds": statistics.median(theirs),
        "times as fast": {"median": statistics.median(pairs), "least": min(pairs), "most": max(pairs)},
        "peak GiB": {"ours": result["peak_bytes"][0] / 2**30, "theirs": result["peak_bytes"][1] / 2**30},
        "gradient norms differ by": result["norm_error_float32"],
    }


def line(result: Mapping[str, Any]) -> str:
    ours, theirs = result["seconds"]
    pairs = [b / a for a, b in zip(ours, theirs, strict=True)]
    our_median, their_median = statistics.median(ours), statistics.median(theirs)
    errors = [result["norm_error"], result["norm_error_float32"]]
    cells = [
        result["theirs"],
        f"{result['turns']} turns, {result['setting']}",
        f"{their_median:.2f}",
        f"{our_median:.2f}",
        f"{result['turns'] / their_median:.1f}",
        f"{result['turns'] / our_median:.1f}",
        f"**{statistics.median(pairs):.2f}** ({min(pairs):.2f} to {max(pairs):.2f})",
        "" if result["goal"] is None else f"{result['goal']}",
        "not comparable, other rows" if None in errors else " / ".join(f"{error:.0e}" for error in errors),
    ]
    return "| " + " | ".join(cells) + " |"


@functools.cache
def versions() -> dict[str, str]:
    """Of the packages that matter, TRL's from its own environment."""
    own = {name: metadata.version(name) for name in ("torch", "transformers", "lightning")}
    return own | _trl_versions()


def _trl_versions() -> dict[str, str]:
    program = "from importlib.metadata import version; print(version('trl'), end='')"
    try:
        done = subprocess.run([PYTHONS["trl_grpo"], "-c", program], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):  # only plain transformers is compared with
        return {}
    return {"trl": done.stdout}
