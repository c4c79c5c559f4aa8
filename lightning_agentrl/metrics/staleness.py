"""How many iterations the weights that sampled a turn are behind those that it trains."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_agentrl.metrics.numbers import Max, Mean, Number
from lightning_agentrl.types import Turn


def staleness(turns: Sequence[Turn], policy_version: int, steps_per_iteration: int) -> list[float]:
    """Of each turn, in iterations.

    Args:
        turns: with the versions of the weights that sampled them.
        policy_version: of the weights that are trained next.
        steps_per_iteration: by which the version grows in an iteration.
    """
    return [(policy_version - turn.policy_version) / steps_per_iteration for turn in turns]


def staleness_numbers(turns: Sequence[Turn], policy_version: int, steps_per_iteration: int) -> dict[str, Number]:
    """Mean and largest; arguments as of :func:`staleness`."""
    ages = staleness(turns, policy_version, steps_per_iteration)
    return {
        "mismatch/staleness_mean": Mean(sum(ages), len(ages)),
        "mismatch/staleness_max": Max(max(ages, default=0.0)),
    }
