"""Curves from logs: TensorBoard events, and CSV files of Lightning or Weights & Biases."""

from __future__ import annotations

import csv
import io
import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_agentrl.tools.view.events import Points, read_events

# Curves that are shown first, in this order; other curves are shown on demand.
MAIN = (
    "rollout/success",
    "rollout/success_window",
    "val/success",
    "rollout/return",
    "rollout/reward_per_turn",
    "rollout/valid_action_ratio",
    "rollout/reply_tokens",
    "kl/reference",
    "kl/thought",
    "kl/action",
    "policy/entropy",
    "rollout/entropy",
    "policy/approx_kl",
    "critic/explained_variance",
    "mismatch/logp_gap_mean",
)
# Columns that count steps, in order of preference, in files of CSVLogger and exports of Weights & Biases.
_STEPS = ("step", "trainer/global_step", "_step", "Step")
_EPOCH = "epoch"
_BOUNDS = ("__MIN", "__MAX")  # suffixes of further columns of an exported chart


@dataclass(frozen=True)
class Curves:
    """Logged metrics of one run.

    Args:
        x: name of the x-axis: the iteration, counted from 1, if Lightning logged its epoch, or else the logger's step.
        points: points by the metric's name.
    """

    x: str
    points: dict[str, Points]


def read_curves(events: Sequence[Path], tables: Sequence[Path] = ()) -> tuple[Curves, list[str]]:
    """Read all curves of a run; return them with notes about what was left out.

    Args:
        events: event files of TensorBoard.
        tables: CSV files; files without a column of steps or epochs are left out.
    """
    notes: list[str] = []
    found = []
    if events:
        by_step, damaged = read_events(events)
        found.append(_by_iteration(by_step))
        notes += [f"{name} is damaged: its curves are shown only up to the damage." for name in damaged]
    for path in tables:
        try:
            found.append(_from_table(path))
        except ValueError as error:
            notes.append(f"{path.name} is left out of the curves: {error}.")
    axis = "iteration" if any(curves.x == "iteration" for curves in found) else "step"
    points: dict[str, Points] = {}
    for curves in reversed(found):  # the first file with a metric takes precedence
        if curves.x == axis:
            points |= curves.points
        elif curves.points:
            notes.append("Curves without iterations are left out, since the others have iterations.")
    return Curves(axis, points), notes


def curves_index(runs: Sequence[Curves]) -> dict[str, Any]:
    """Return the curves for the page's index.

    ``main`` lists the curves to show first, ``series`` has ``[xs, ys]`` by curve and run.

    If runs have different x-axes, the axis is labeled as steps.
    """
    names = sorted({name for run in runs for name in run.points})
    main = [name for name in MAIN if name in names]
    if "policy/entropy" in main and "rollout/entropy" in main:  # the two entropies are nearly equal
        main.remove("rollout/entropy")
    series = {name: [_sorted(run.points[name]) if name in run.points else None for run in runs] for name in names}
    axes = {run.x for run in runs if run.points}
    return {"x": axes.pop() if len(axes) == 1 else "step", "main": main, "series": series}


def _sorted(points: Points) -> list[list[float]]:
    xs = sorted(points)
    whole = [int(x) if float(x).is_integer() else x for x in xs]  # the page rounds floats
    return [whole, [points[x] for x in xs]]


def _from_table(path: Path) -> Curves:
    """Read a CSV file: a log of CSVLogger, or a history or chart exported from Weights & Biases.

    Raises:
        ValueError: the file has no curves, or curves of several runs.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as opened:
            text = opened.read()
        rows = list(csv.DictReader(io.StringIO(text, newline=""), restkey="", restval=None))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"it cannot be read ({error})") from error
    if rows and not text.endswith(("\n", "\r")) and None in rows[-1].values():
        rows.pop()  # the last row is incomplete
    columns = list(rows[0]) if rows else []
    x = next((name for name in (*_STEPS, _EPOCH) if name in columns), None)
    if x is None:
        raise ValueError(f"it has no column {', '.join(_STEPS)} or {_EPOCH}")
    names = {name: name for name in columns if name and name not in _STEPS and not name.startswith("_")}
    names = {name: name for name in names if not name.endswith(_BOUNDS)}
    prefixes = {name.rpartition(" - ")[0] for name in names} - {""}
    if len(prefixes) > 1:
        raise ValueError(f"it has curves of {len(prefixes)} runs ({', '.join(sorted(prefixes))}), export one of them")
    points: dict[str, Points] = {}
    for row in rows:
        for name in names:
            with suppress(ValueError, TypeError):  # a cell may be empty or a text
                step, y, curve = float(row[x]), float(row[name]), name.rpartition(" - ")[2]
                if not math.isfinite(step) or (math.isnan(y) and step in points.get(curve, {})):
                    continue  # some exports fill the other rows of a step with NaN
                points.setdefault(curve, {})[step] = y
    return _by_iteration(points if x != _EPOCH else {**points, _EPOCH: {step: step for step in points.get(_EPOCH, {})}})


def _by_iteration(by_step: dict[str, Points]) -> Curves:
    """Replace steps by iterations if epochs were logged.

    A step has the iteration of the next step with a logged epoch, or of the last such step, since some callbacks, such
    as LearningRateMonitor, log at other steps.
    """
    epochs = {step: epoch for step, epoch in by_step.pop(_EPOCH, {}).items() if math.isfinite(epoch)}
    if not epochs:
        return Curves("step", by_step)
    noted = sorted(epochs)

    def iteration(step: float) -> int:
        return round(epochs[noted[min(bisect_left(noted, step), len(noted) - 1)]]) + 1

    return Curves(
        "iteration",
        {name: {iteration(s): y for s, y in sorted(points.items())} for name, points in by_step.items()},
    )
