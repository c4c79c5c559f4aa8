"""The best size of a micro-batch for everyone we are compared with, found once and kept in `tuned.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed.comparisons import SIZES, Comparison, Side
from benchmarks.speed.contender import Contender
from benchmarks.speed.job import Job
from benchmarks.speed.layouts import Case

TUNED = Path(__file__).with_name("tuned.json")
ROWS = {"cpu": 16, "cuda": 64}  # of the step that is tried, which decides as more would


def name_of(side: Side, case: Case, precision: str) -> str:
    parts = [side.module, side.variant, "episodes" if side.episodes else ""]
    return " ".join([*filter(None, parts), f"{case.prompt}/{case.shared} {precision}"])


def known(file: Path) -> dict[str, Any]:
    """What was found so far."""
    return json.loads(file.read_text()) if file.exists() else {}


def tuned_size(side: Side, case: Case, precision: str, file: Path) -> int:
    """The best known size."""
    return int(known(file)[name_of(side, case, precision)]["best"])


def tune(comparisons: Sequence[Comparison], job: Job, anew: bool, file: Path) -> None:
    """Try all sizes for their side of the comparisons: one step that warms up and one that counts.

    The processes of a side load their models at the same time and step one after the other.

    Args:
        comparisons: whose sides.
        job: everything but the size.
        anew: try those too whose best size is known.
        file: of the best sizes of this model on this device.
    """
    kept = known(file)
    sides = {name_of(c.theirs, c.case, c.precision): (c.theirs, c.case, c.precision) for c in comparisons}
    for name, (side, case, precision) in sides.items():
        if name in kept and not anew:
            continue
        rows = min(ROWS[job.device], job.turns)
        wanted = replace(
            job,
            case=case,
            precision=precision,
            turns=rows * case.turns_per_episode if side.episodes else rows,
            variant=side.variant,
            episodes=side.episodes,
        )
        sizes = SIZES[job.device]["episodes" if side.episodes else side.module]
        seconds = {}
        with ExitStack() as all_at_once:
            contenders = {
                size: all_at_once.enter_context(Contender(side.module, replace(wanted, micro_batch=size)))
                for size in sizes
            }
            for contender in contenders.values():
                contender.wait_until_ready()
            for size, contender in contenders.items():
                contender.step()
                seconds[str(size)] = round(contender.step().seconds, 3)
                contender.leave()  # and give its memory back
        best = min(seconds, key=lambda size: seconds.get(size, math.inf))
        kept[name] = {"best": int(best), "seconds": seconds}
        file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
        print(f"{name}: {seconds}", flush=True)
