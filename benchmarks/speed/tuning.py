"""The best size of a micro-batch for every contender, found once and kept in `tuned.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed.comparisons import EPISODE_SIZES, OURS, SIZES, Comparison, Side
from benchmarks.speed.contender import Contender
from benchmarks.speed.job import Job
from benchmarks.speed.layouts import Case

TUNED = Path(__file__).with_name("tuned.json")


def name_of(side: Side, case: Case, precision: str) -> str:
    rows = " episodes" if side.episodes else ""
    return f"{side.module} {side.variant}{rows} {case.prompt}/{case.shared} {precision}"


def tuned_size(side: Side, case: Case, precision: str) -> int:
    """The best known size."""
    kept: dict[str, Any] = json.loads(TUNED.read_text())
    return int(kept[name_of(side, case, precision)]["best"])


def tune(comparisons: Sequence[Comparison], job: Job) -> None:
    """Try all sizes for both sides of the comparisons, one warm step and one that counts, and keep the result."""
    sides = {
        (side, comparison.case, comparison.precision)
        for comparison in comparisons
        for side in (OURS, comparison.theirs)
    }
    kept: dict[str, Any] = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    for side, case, precision in sorted(sides, key=lambda key: name_of(*key)):
        rows = job.turns // case.turns_per_episode if side.episodes else job.turns
        seconds = {}
        for size in EPISODE_SIZES if side.episodes else SIZES[side.module]:
            if side.module == "trl_grpo" and size > rows:
                continue
            wanted = replace(
                job,
                case=case,
                precision=precision,
                variant=side.variant,
                episodes=side.episodes,
                micro_batch=size,
            )
            with Contender(side.module, wanted) as contender:
                contender.step()
                seconds[str(size)] = round(contender.step().seconds, 3)
        best = min(seconds, key=lambda size: seconds.get(size, math.inf))
        name = name_of(side, case, precision)
        kept[name] = {"best": int(best), "seconds": seconds, "turns": job.turns}
        TUNED.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
        print(f"{name}: {seconds}", flush=True)
