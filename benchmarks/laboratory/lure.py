"""Where a discount per token prefers a near reward to a far one: the measured boundary beside the predicted one.

    python -m benchmarks.laboratory.lure             # three seeds, an hour on two cores; then docs/results/lure.md
    python -m benchmarks.laboratory.lure --share 1/2 # of the runs, for several processes
    python -m benchmarks.laboratory.lure --report    # the page from the runs that are there

A run that is in the record or in the folder is not made again, so this can be stopped at any time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from statistics import fmean

from benchmarks.laboratory.arms import Arm, play
from benchmarks.laboratory.cloning import Start, cloned
from benchmarks.laboratory.fits import quiet
from benchmarks.laboratory.markdown import table
from benchmarks.laboratory.measures import Run
from benchmarks.laboratory.records import Records, as_text, load, save, share
from lightning_agentrl.advantages import GAE

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "results" / "lure.json"
LURES, LENGTHS, GAMMAS = (0.3, 0.5, 0.7), (1, 2, 4, 8), (0.99, 0.97, 0.95)
ITERATIONS, SEEDS, LAM = 24, 3, 0.95
GOAL_TURNS, LURE_TURNS = 12, 3  # of the shortest ways from every start
DUAL = None  # in place of a discount per token
Place = tuple[float, int, float | None]  # reward of the lure, words of a reply, discount per token
TEXT = """\
# The lure: what a discount per token makes of a far reward

In the game of [the laboratory](laboratory.md) with a lure, the goal pays 1 after {goal} turns and a cell on the wayside
pays c after {near}, and ends the episode. A discount g per token makes the goal worth g<sup>{goal} L</sup> in replies
of L words, so the best policy takes the lure from **L = ln(1/c) / ({between} ln(1/g))** on. The dual discount counts
turns: with .99 a turn no lure below .91 is worth it, however long replies are. Written by
`python -m benchmarks.laboratory.lure`; {runs} runs of {iterations} iterations, {seeds} for each place,
otherwise as in the laboratory (lambda {lam}).

![success at the end, with the predicted boundary](lure.png)

Exact success at the end, mean of the seeds; **bold** where the prediction is that the lure is worth more. In brackets
that of the start.

{table}

## Measured and predicted boundary

The length of replies at which the success at the end falls below that of the start, along the straight line between
neighbouring lengths on a logarithmic axis.

{boundaries}

{agree}
"""


def predicted(lure: float, gamma: float) -> float:
    """Return the length of replies from which the lure is worth more than the goal, seen from the start."""
    return math.log(1 / lure) / ((GOAL_TURNS - LURE_TURNS) * math.log(1 / gamma))


def places() -> list[Place]:
    return [(*both, gamma) for gamma in (*GAMMAS, DUAL) for both in product(LURES, LENGTHS)]


def arm_of(gamma: float | None) -> Arm:
    return Arm() if gamma is DUAL else Arm(GAE, {"gamma": gamma, "lam": LAM})


def start_of(lure: float, words: int) -> Start:
    return Start(lure=lure, reply_tokens=words)


def key(place: Place, seed: int) -> str:
    """Return what tells a run apart from all that differ in what they would show."""
    lure, words, gamma = place
    settings = repr((start_of(lure, words), arm_of(gamma), ITERATIONS))
    return f"lure-{hashlib.sha256(settings.encode()).hexdigest()[:12]}-{seed}"


def kept(folder: Path) -> Records:
    """Return the runs of the record and of a folder."""
    return load(folder, RECORD, {key(place, seed) for place in places() for seed in range(SEEDS)})


def run(folder: Path, part: int, parts: int) -> None:
    """Make the runs of a share that are not there, all places with one seed before the next."""
    made = kept(folder)
    for seed, place in list(product(range(SEEDS), places()))[part - 1 :: parts]:
        name = key(place, seed)
        if name in made or (folder / f"{name}.json").exists():
            continue
        lure, words, gamma = place
        start = start_of(lure, words)
        done = play(start, cloned(start, folder), arm_of(gamma), ITERATIONS, seed)
        save(folder / f"{name}.json", json.dumps(done))
        curve = done["curve"]
        print(f"{place}, seed {seed}: {curve[0]:.2f} to {curve[-1]:.2f}, {done['seconds']:.0f} s", flush=True)


def by_place(records: Records) -> dict[Place, list[Run]]:
    """Return the runs of the places that have any."""
    found = {place: [records[k] for s in range(SEEDS) if (k := key(place, s)) in records] for place in places()}
    return {place: runs for place, runs in found.items() if runs}


def first_and_last(runs: list[Run]) -> tuple[float, float]:
    return fmean(run["curve"][0] for run in runs), fmean(run["curve"][-1] for run in runs)


def boundary(runs: Mapping[Place, list[Run]], lure: float, gamma: float | None) -> tuple[float, float] | None:
    """Return the lengths between which success at the end falls below that of the start; None: runs are missing.

    Where it crosses on a line between two lengths, both numbers are that place; below the first length the range
    begins with 0, and where it never falls it ends with infinity.
    """
    if any((lure, words, gamma) not in runs for words in LENGTHS):
        return None
    gains = []
    for words in LENGTHS:
        first, last = first_and_last(runs[lure, words, gamma])
        gains.append(last - first)
    if gains[0] < 0:
        return 0.0, float(LENGTHS[0])
    for shorter, longer, before, after in zip(LENGTHS, LENGTHS[1:], gains, gains[1:], strict=False):
        if after < 0:
            crossing = shorter * (longer / shorter) ** (before / (before - after))
            return crossing, crossing
    return float(LENGTHS[-1]), math.inf


def _told(measured: tuple[float, float] | None) -> str:
    if measured is None:
        return "not run yet"
    low, high = measured
    return f"{low:.1f}" if low == high else f"above {low:g}" if high == math.inf else f"below {high:g}"


def page(records: Records) -> str:
    runs = by_place(records)
    rows = []
    for lure, gamma in product(LURES, (*GAMMAS, DUAL)):
        row = [f"{lure:g}", "dual, .99 a turn" if gamma is DUAL else f"{gamma:g} a token"]
        for words in LENGTHS:
            if (lure, words, gamma) not in runs:
                row.append("")
                continue
            first, last = first_and_last(runs[lure, words, gamma])
            lured = gamma is not DUAL and words > predicted(lure, gamma)
            row.append(f"**{last:.2f}** ({first:.2f})" if lured else f"{last:.2f} ({first:.2f})")
        rows.append(row)
    edges, agree, asked = [], 0, 0
    for lure, gamma in product(LURES, GAMMAS):
        edges.append([f"{lure:g}", f"{gamma:g}", f"{predicted(lure, gamma):.1f}", _told(boundary(runs, lure, gamma))])
        for words in LENGTHS:
            if (lure, words, gamma) in runs:
                first, last = first_and_last(runs[lure, words, gamma])
                asked += 1
                agree += (last < first) == (words > predicted(lure, gamma))
    steady = [first_and_last(of) for (_, _, gamma), of in runs.items() if gamma is DUAL]
    counts = sorted({len(of) for of in runs.values()})
    return TEXT.format(
        goal=GOAL_TURNS,
        near=LURE_TURNS,
        between=GOAL_TURNS - LURE_TURNS,
        runs=sum(map(len, runs.values())),
        iterations=ITERATIONS,
        seeds=" or ".join(map(str, counts)),
        lam=LAM,
        table=table(rows, ["lure", "discount", *(f"L = {words}" for words in LENGTHS)]),
        boundaries=table(edges, ["lure", "discount per token", "predicted", "measured"]),
        agree=f"In {agree} of {asked} places success moved to the side of the start that is predicted. With the dual "
        f"discount it rose in {sum(last > first for first, last in steady)} of {len(steady)}.",
    )


def draw(records: Records, path: Path) -> None:
    """Draw the success at the end over length and discount, a picture for each lure, with the predicted line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    runs = by_place(records)
    figure, axes = plt.subplots(1, len(LURES), figsize=(9.5, 3), layout="constrained", sharey=True)
    for axis, lure in zip(axes, LURES, strict=True):
        ends = [
            [
                first_and_last(runs[lure, words, gamma])[1] if (lure, words, gamma) in runs else np.nan
                for words in LENGTHS
            ]
            for gamma in GAMMAS
        ]
        image = axis.imshow(ends, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for row, column in product(range(len(GAMMAS)), range(len(LENGTHS))):
            axis.text(column, row, f"{ends[row][column]:.2f}", ha="center", va="center", color="white", fontsize=8)
        rows = np.linspace(0, len(GAMMAS) - 1, 50)
        rates = np.interp(rows, range(len(GAMMAS)), np.log(GAMMAS))
        lengths = [math.log2(predicted(lure, math.exp(rate))) for rate in rates]
        axis.plot(lengths, rows, color="red", linewidth=2)
        axis.set(xlim=(-0.5, len(LENGTHS) - 0.5), xticks=range(len(LENGTHS)), xticklabels=LENGTHS)
        axis.set(yticks=range(len(GAMMAS)), yticklabels=GAMMAS, xlabel="words of a reply", title=f"lure {lure:g}")
    axes[0].set_ylabel("discount per token")
    figure.colorbar(image, ax=axes, label="success at the end")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing; write the page of the runs that are there")
    parser.add_argument("--share", type=share, default="1/1", help="of the runs, for several processes: 1/2 and 2/2")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "laboratory", help="folder of runs and models")
    given = parser.parse_args()
    quiet()
    if not given.report:
        run(given.runs, *given.share)
    if given.report or given.share == (1, 1):
        records = kept(given.runs)
        save(RECORD, as_text(records))
        save(RECORD.with_suffix(".md"), page(records))
        draw(records, RECORD.with_suffix(".png"))


if __name__ == "__main__":
    main()
