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

Seconds of one optimizer step on turns with replies of 8 tokens, from the collected turns to the new weights:
{model}, all weights trained, {device}. Written by `make benchmarks`.

Both sides train on the same tokens (random ones) with the same given advantages: no critic, no reference, one step per
rollout, AdamW, clipped gradients, glibc's allocator tuned alike, no gradient checkpointing. Our micro-batches have
{tokens} tokens, as {config}; the others have the size that was the fastest of several for them
(`benchmarks/speed/tuned.json`). Both sides run their own training loop. They take steps in turn; a ratio is of two
steps that follow each other, and above 1 where lightning-agentrl is faster. Prompts are of one length here, so that
nobody computes padding.
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
    "norms differ by",
)
NOTES = """\

* **TRL GRPO** is `GRPOTrainer`, the synchronous class, as installed. It projects only completions on the vocabulary if
  Triton runs, and all positions on a CPU. *Projecting scored positions only* is a subclass that runs the backbone, then
  the head on the sampled positions.
* **A row per episode** is TRL's own layout of a multi-turn episode: 16 rows of about 235 tokens, each with 8 replies
  among observations. The turn samples hold the same observations and replies, each after the shared tokens only.
* **plain transformers** computes every turn from its first token, in rows without padding, and nothing but the loss.
* **TRL's prefix tree** is the packing and attention of its `AsyncGRPOTrainer`, which shares prefixes across prompts as
  we do, without a critic and for text only. Its kernel, FlashAttention 3, needs a GPU; on a CPU a loop over segments
  takes its place, so such a line shows that both compute the same and little about speed.
* *Our `kernels: compiled`* is one key of the config; its default, `auto`, does not compile on a CPU. TRL is not
  compiled.
* A line is kept until it is measured anew, so lines may be of different versions of this package, and of different
  numbers of turns and steps. Single pairs scatter by about 10 %.
* The last column compares the gradient norms of the two sides' first steps: in the precision of the line, in float32.
"""


def markdown(results: Mapping[str, Mapping[str, Any]], packages: Mapping[str, str]) -> str:
    """The page; ratios are made from the seconds here."""
    some = next(iter(results.values()))
    lines = [line(result) for result in results.values()]
    repeats = {len(result["seconds"][0]) for result in results.values()}
    foot = f"\nMedians over {' or '.join(map(str, sorted(repeats)))} steps of each side, after one that warms up. "
    foot += ", ".join(f"{name} {version}" for name, version in packages.items()) + ".\n"
    on_gpu = some.get("device") == "cuda"
    head = INTRODUCTION.format(
        model=some.get("model", NAME),
        device="one GPU" if on_gpu else f"{some['threads']} threads on a CPU",
        config="those of the configs for GPUs" if on_gpu else "the quickstart had then",
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
        "other rows" if None in errors else " / ".join(f"{error:.0e}" for error in errors),
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
