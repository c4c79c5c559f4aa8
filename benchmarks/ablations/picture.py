"""The curves of every comparison: base against arm."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.ablations.arms import COMPARISONS
from benchmarks.ablations.records import Record
from benchmarks.ablations.summary import Pair, share

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLUMNS = {"rollout/reward_per_turn": "reward per turn", "rollout/success_window": "success, last 100 episodes"}
# Of Okabe and Ito, told apart with any colour vision; the dashes and marks are for print in grey.
STYLES = {"base": ("#0072B2", "-", "s"), "arm": ("#D55E00", (0, (4, 1.5)), "o")}


def draw(pairs: Mapping[str, Pair], path: Path) -> None:
    """A row for each comparison, reward on the left and success on the right, with the same axes in all rows."""
    size = (8.5, 2.1 * len(COMPARISONS))
    figure, grid = plt.subplots(
        len(COMPARISONS), len(COLUMNS), figsize=size, sharex=True, sharey="col", constrained_layout=True, squeeze=False
    )
    for row, comparison in zip(grid, COMPARISONS, strict=True):
        both = pairs[comparison.arm]
        for axis, (name, label) in zip(row, COLUMNS.items(), strict=True):
            for what, records in (("base", both.base), ("arm", both.arm)):
                if records:
                    _lines(axis, name, records, what, comparison.base_is if what == "base" else comparison.arm_is)
            axis.set_ylabel(label, fontsize=8)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_title(comparison.title, fontsize=10, fontweight="bold", loc="left")
        if both.base:
            row[0].legend(fontsize=7.5, frameon=False, loc="upper left")
        _held_out(row[1], both)
    low, high = grid[0, 0].get_ylim()
    grid[0, 0].set_ylim(low, high + 0.3 * (high - low))  # room for the legends
    grid[0, 1].set_ylim(0, 1.02)
    for axis in grid[-1]:
        axis.set_xlabel("iteration", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _lines(axis: Axes, name: str, records: Sequence[Record], what: str, label: str) -> None:
    colour, dash, _ = STYLES[what]
    curves = [dict(map(tuple, record["curves"].get(name, []))) for record in records]
    for curve in curves:
        axis.plot(list(curve), list(curve.values()), color=colour, linestyle=dash, linewidth=0.7, alpha=0.5)
    common = sorted(set.intersection(*map(set, curves)))
    means = [statistics.mean(curve[x] for curve in curves) for x in common]
    axis.plot(common, means, color=colour, linestyle=dash, linewidth=2.2, label=label)


def _held_out(axis: Axes, both: Pair) -> None:
    """Marks at both ends: large ones the mean, small ones the seeds."""
    if not both.base:
        return
    curves = [points for record in [*both.base, *both.arm] for points in record["curves"].values() if points]
    end = max(points[-1][0] for points in curves) + 1
    for (what, records), shift in zip((("base", both.base), ("arm", both.arm)), (-0.12, 0.12), strict=True):
        colour, _, mark = STYLES[what]
        for x, when in ((0, "before"), (end, "after")):
            seeds = [share([record], when) for record in records]
            axis.plot([x + shift] * len(seeds), seeds, mark, color=colour, markersize=3, alpha=0.5)
            axis.plot(x + shift, share(records, when), mark, color=colour, markersize=6)
