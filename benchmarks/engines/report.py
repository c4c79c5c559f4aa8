"""The section on throughput of `docs/results/vllm.md`, made from `vllm.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pages import put

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "vllm.json"
Record = dict[str, Any]


def keep(kind: str, record: Record, file: Path = RESULTS) -> None:
    """Put a record in the place of an older one of its kind, environments and engine, and write the page."""
    records: dict[str, list[Record]] = json.loads(file.read_text()) if file.exists() else {}
    others = [other for other in records.get(kind, []) if _setting(other) != _setting(record)]
    records[kind] = sorted([*others, record], key=lambda other: other["envs"])
    file.write_text(json.dumps(records, indent=1) + "\n")
    if file == RESULTS:  # the page is of the CPU and the demo model
        put(file.with_suffix(".md"), "throughput", page(records))


def _setting(record: Record) -> tuple[int, str]:
    return record["envs"], json.dumps(record.get("engine", {}))


def page(records: dict[str, list[Record]]) -> str:
    lines = [
        "## Rollouts with vLLM",
        "",
        "`VLLMEngine` on a CPU with two threads, the model `demo` in float32. Written by the scripts in",
        "`benchmarks/engines` from `vllm.json`. A ratio compares two successive measurements: median (range).",
        "",
        *_throughput(records.get("throughput", [])),
    ]
    return "\n".join(lines)


def spread(numbers: Sequence[float]) -> str:
    return f"**{median(numbers):.2f}** ({min(numbers):.2f} to {max(numbers):.2f})"


def _throughput(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    lines = [
        "### Against vLLM alone",
        "",
        "Tokens per second of a rollout whose environments take no time, divided by those of vLLM in a plain loop with",
        "the same prompts, reply lengths and number of rows. *All at once*: vLLM gets all prompts at the start. *In",
        "turns*: as in a rollout, an environment's next prompt follows its last reply, so fewer rows run near the end.",
        "",
        "| environments | turns of each | reply tokens at most | tokens | tokens/s, vLLM alone | rollout / all at once "
        "| rollout / in turns |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        pairs = record["pairs"]
        alone = median(pair["tokens"] / pair["alone_seconds"] for pair in pairs)
        shares = [pair["alone_seconds"] / pair["rollout_seconds"] for pair in pairs]
        in_turns = [pair["in_turns_seconds"] / pair["rollout_seconds"] for pair in pairs]
        tokens = median(pair["tokens"] for pair in pairs)
        lines.append(
            f"| {record['envs']} | {record['turns']} | {record['reply']} | {tokens:.0f} | {alone:.0f} "
            f"| {spread(shares)} | {spread(in_turns)}, {len(pairs)} pairs |"
        )
    return [*lines, ""]
