"""Curves from TensorBoard event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Shown first, in this order; the rest is one press away.
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


def read_curves(events: Path | None) -> dict[str, Any]:
    """Return all logged scalars: ``x`` names the axis, ``main`` the curves to show first, ``series`` is ``[xs, ys]``.

    The axis is the iteration, counted from 1, if Lightning logged its epoch; else the logger's step.
    """
    if events is None:
        return {"x": "step", "main": [], "series": {}}
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})  # 0 keeps every point
    accumulator.Reload()
    points = {
        name: {event.step: float(event.value) for event in accumulator.Scalars(name)}
        for name in accumulator.Tags()["scalars"]
    }
    epochs = points.pop("epoch", {})
    known = bool(epochs) and all(step in epochs for by_step in points.values() for step in by_step)
    series: dict[str, list[list[float]]] = {}
    for name in sorted(points):
        by_x = {round(epochs[s]) + 1 if known else s: y for s, y in sorted(points[name].items())}
        series[name] = [list(by_x), list(by_x.values())]
    main = [name for name in MAIN if name in series]
    if "policy/entropy" in main and "rollout/entropy" in main:  # nearly the same curve twice
        main.remove("rollout/entropy")
    return {"x": "iteration" if known else "step", "main": main, "series": series}
