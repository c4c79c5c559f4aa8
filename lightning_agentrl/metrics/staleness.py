"""Staleness: how many iterations the weights that sampled a turn lag behind those that train on it."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_agentrl.metrics.numbers import Max, Mean, Number
from lightning_agentrl.types import Turn


def staleness(
    turns: Sequence[Turn], policy_version: int, steps_per_iteration: int, held_steps: range = range(0)
) -> list[float]:
    """Return the staleness of each turn, in iterations in which the policy may have moved.

    Args:
        turns: turns with the versions of the weights that sampled them.
        policy_version: version of the weights that are trained next.
        steps_per_iteration: optimizer steps by which the version grows per iteration.
        held_steps: in which the version grows and the policy stays the same.
    """

    def moves(version: int) -> int:
        return version - min(max(version - held_steps.start, 0), len(held_steps))

    return [(moves(policy_version) - moves(turn.policy_version)) / steps_per_iteration for turn in turns]


def staleness_numbers(
    turns: Sequence[Turn], policy_version: int, steps_per_iteration: int, held_steps: range = range(0)
) -> dict[str, Number]:
    """Return the mean and the maximum; arguments as in :func:`staleness`."""
    ages = staleness(turns, policy_version, steps_per_iteration, held_steps)
    return {
        "mismatch/staleness_mean": Mean(sum(ages), len(ages)),
        "mismatch/staleness_max": Max(max(ages, default=0.0)),
    }
